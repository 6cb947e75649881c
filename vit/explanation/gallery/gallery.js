"use strict";
const element = id => document.getElementById(id);
const cards = [...document.querySelectorAll("figure")];

// the map of a card that the menus choose; maps of no class have an empty target
function chooseMap(card) {
  const maps = [...card.querySelectorAll(".map")].filter(map => map.dataset.method === element("method").value);
  const target = element("class").value;
  return maps.find(map => target === "own" || map.dataset.target === "" || map.dataset.target === target);
}

function update() {
  let count = 0;
  for (const card of cards) {
    const chosen = chooseMap(card);
    for (const part of card.querySelectorAll("[data-map]")) part.hidden = !chosen || part.dataset.map !== chosen.dataset.map;
    card.querySelector(".none").hidden = Boolean(chosen);
    const isShown = (name, value) => !element(name).value || element(name).value === value;
    card.hidden = !isShown("predicted", card.dataset.predicted) || !isShown("verdict", chosen?.dataset.verdict);
    count += !card.hidden;
    point(card, null);
  }
  element("count").textContent = `${count} of ${cards.length} photos.`;
}

function sort() {
  const order = element("sort").value;
  const key = card => order === "given" ? Number(card.dataset.number) : (order === "lowest" ? 1 : -1) * Number(card.dataset.confidence);
  for (const card of [...cards].sort((one, other) => key(one) - key(other))) element("cards").append(card);
}

// show which patches the patch in this row and column attends to, or the map again
function point(card, patch) {
  card.patch = patch;
  card.classList.toggle("pointed", Boolean(patch));
  card.querySelector(".about").textContent = patch ? `what the patch in row ${patch[0] + 1}, column ${patch[1] + 1} attends to, through all layers` : "";
  if (!patch) return;
  const { style } = card.querySelector(".seen");
  style.setProperty("--row", patch[0]);
  style.setProperty("--column", patch[1]);
}

for (const card of cards) {
  if (!card.querySelector(".flow")) continue;
  const seen = card.querySelector(".seen");
  const [rows, columns] = ["--rows", "--columns"].map(name => Number(seen.style.getPropertyValue(name)));
  const limit = (index, count) => Math.min(Math.max(index, 0), count - 1);
  seen.addEventListener("click", event => {
    const box = seen.getBoundingClientRect();
    const row = limit(Math.floor((event.clientY - box.top) / box.height * rows), rows);
    const column = limit(Math.floor((event.clientX - box.left) / box.width * columns), columns);
    point(card, String(card.patch) === String([row, column]) ? null : [row, column]);
  });
  seen.addEventListener("keydown", event => {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key === "Escape") point(card, null);
    if (!(event.key in steps)) return;
    event.preventDefault();
    const [row, column] = card.patch || [Math.floor(rows / 2), Math.floor(columns / 2)];
    const [down, right] = card.patch ? steps[event.key] : [0, 0];
    point(card, [limit(row + down, rows), limit(column + right, columns)]);
  });
}
for (const id of ["method", "class", "predicted", "verdict"]) element(id).addEventListener("change", update);
element("sort").addEventListener("change", sort);
element("opacity").addEventListener("input", () => document.body.style.setProperty("--opacity", element("opacity").value / 100));
update();
