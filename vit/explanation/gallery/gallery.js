"use strict";
// Each image is a JSON text of its own, decoded when its card is shown; all but the first follow this script. Values are in multiples of the average patch: 1 is
// what each patch would have if all had the same. Tokens are numbered as in the model: first those that are no patches.
const element = name => document.getElementById(name);
const page = JSON.parse(element("page").textContent);
const bytes = text => Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
const palettes = page.palettes.map(bytes);
const ATTENTION = "attention of a layer", LENS = "logit lens";
const COLOURS = "token colours", SIMILARITY = "similarity to a patch", NORMS = "token norms";
const LAYERED = [ATTENTION, LENS, COLOURS, SIMILARITY, NORMS];
const OUTLIER = 2; // times the median norm
const RANKS = ["most probable", "2nd most probable", "3rd most probable"];
const EACH = "each"; // every label that is explained, side by side
const NUMBERS = {agreement: "correlation with the loss without each patch", p_value: "p"};
const CARDS_AT_ONCE = 24;
const CONFIDENCES = [["0", "below 50\u00a0%"], ["50", "50 to 90\u00a0%"], ["90", "90\u00a0% and above"]];
const unique = values => [...new Set(values)];

let stored = [];
/** Whether the text of an image is there: the first ones are drawn while the rest of the page still loads. */
function isLoaded(index) {
  if (!stored[index]) stored = document.querySelectorAll("script.image");
  return Boolean(stored[index] && stored[index].nextElementSibling);
}

// --- an image and what can be shown of it ---------------------------------------------------------------------

class Explained {
  constructor(index) {
    Object.assign(this, page.images[index], JSON.parse(stored[index].textContent));
    this.patches = this.grid[0] * this.grid[1];
    this.prefix = this.tokens ? this.tokens.names.length : 0;
    this.count = this.prefix + this.patches;
    for (const map of this.maps) {
      const span = (map.high - map.low) / 255;
      map.shares = Float32Array.from(bytes(map.values), cell => map.low + (span ? cell * span : 0));
    }
  }

  name(token) {
    if (token < this.prefix) return "the " + this.tokens.names[token];
    return `patch (row ${Math.floor((token - this.prefix) / this.grid[1])}, column ${(token - this.prefix) % this.grid[1]})`;
  }

  /** The map of a method for a class: its rank among those explained, "class:" and its index, or EACH for the first. */
  map(method, wanted) {
    const maps = this.maps.filter(map => map.method === method);
    if (maps.length && !maps[0].target) return maps[0];
    if (wanted.startsWith("class:")) return maps.find(map => map.target.index === Number(wanted.slice(6)));
    return maps.sort((a, b) => b.target.percent - a.target.percent)[wanted === EACH ? 0 : Number(wanted)];
  }

  /** The stored attention of a layer and head ("mean" of them), or undefined where it was left out. */
  matrix(layer, head) {
    if (!this.tokens) return undefined;
    const same = (stored, wanted) => stored === (wanted === "mean" ? null : wanted);
    return this.tokens.attention.find(each => same(each.layer, layer) && same(each.head, head));
  }

  rollout() { return this.matrix(null, null); }

  /** An entry of quantised attention, in multiples of the average token. */
  entry(rows, row, column) {
    const part = column < this.prefix ? 0 : 1;
    return rows.cells[row * this.count + column] / 255 * rows.highs[2 * row + part] * this.count;
  }

  /** What a token takes from each: a row of the matrix, as {grid, values of the patches, ofPrefix}. */
  row(rows, number) {
    decodeRows(rows);
    return this.split(Float32Array.from({length: this.count}, (_, column) => this.entry(rows, number, column)));
  }

  /** What each token takes from one of them: a column of the matrix. */
  column(rows, token) {
    decodeRows(rows);
    return this.split(Float32Array.from({length: this.count}, (_, number) => this.entry(rows, number, token)));
  }

  /** Values of all tokens as those of the patches on their grid and those of the prefix. */
  split(values) {
    return {grid: this.grid, values: values.subarray(this.prefix), ofPrefix: values.subarray(0, this.prefix)};
  }

  /** Attention of a layer and head as a view. Without a token: what the classifier reads there. */
  attention(layer, head, token, direction) {
    let rows = this.matrix(layer, head), said = title(layer, head);
    if (token === null) {
      const pooled = this.tokens && this.tokens.pooled;
      if (!pooled || layer === null) return null;
      const heads = head === "mean" ? [...Array(this.tokens.heads).keys()] : [head];
      const each = heads.map(one => this.row(pooled, layer * this.tokens.heads + one));
      const mean = key => each[0][key].map((_, i) => each.reduce((sum, row) => sum + row[key][i], 0) / each.length);
      return attentionView({grid: this.grid, values: mean("values"), ofPrefix: mean("ofPrefix")},
        `what the classifier reads: ${said}`);
    }
    if (!rows && this.matrix(layer, "mean")) [rows, said] = [this.matrix(layer, "mean"), `${title(layer, "mean")} (single heads are not in this page)`];
    if (!rows && this.rollout()) [rows, said] = [this.rollout(), "rollout" + (layer === null ? "" : " (single layers are not in this page)")];
    if (!rows) return null;
    return direction === "reads"
      ? attentionView(this.row(rows, token), `what ${this.name(token)} attends to: ${said}`)
      : attentionView(this.column(rows, token), `what attends to ${this.name(token)}: ${said}`);
  }

  /** The class that a token alone would give after a layer: {index, percent}. */
  lensClass(layer, token) {
    const lens = this.readLens(), at = layer * this.count + token;
    return {index: lens.top[at], percent: lens.probability[at] / 2.55};
  }

  readLens() {
    const lens = this.tokens && this.tokens.lens;
    if (lens && !lens.top) {
      lens.top = new Uint16Array(bytes(lens.classes).buffer);
      lens.probability = bytes(lens.probabilities);
      lens.target = bytes(lens.target_probabilities);
    }
    return lens;
  }

  /** The probability of a class that each token alone would give after a layer. */
  lensView(layer, wanted) {
    const lens = this.readLens();
    if (!lens) return null;
    const number = wanted.startsWith("class:") ? lens.targets.indexOf(Number(wanted.slice(6))) : Number(wanted);
    if (!(number in lens.targets)) return null;
    const start = (number * this.tokens.layers + layer) * this.count;
    const all = Float32Array.from(lens.target.subarray(start, start + this.count), value => value / 2.55);
    return {...this.split(all), low: 0, high: 100,
      unit: "\u00a0%", signed: false, about: `probability of ${page.classes[lens.targets[number]]} that each patch alone would give after layer ${layer}`};
  }

  readFeatures() {
    const features = this.tokens && this.tokens.features;
    if (features && !features.cells) {
      features.cells = bytes(features.colours);
      features.lengths = bytes(features.norms);
      features.rows = features.coordinates && new Int8Array(bytes(features.coordinates).buffer);
    }
    return features;
  }

  /** The first three principal components of the patches' tokens as red, green and blue. */
  coloursView(layer) {
    const features = this.readFeatures();
    if (!features) return null;
    const size = 3 * this.patches, colours = features.cells.subarray(layer * size, (layer + 1) * size);
    return {grid: this.grid, values: new Float32Array(this.patches), colours, low: 0, high: 1, unit: "", signed: false,
      about: `patches of like colour have like tokens after layer ${layer}: red, green and blue are the first three principal components`};
  }

  /** The length of each token that leaves a layer, in multiples of the median over the patches. */
  normsView(layer) {
    const features = this.readFeatures();
    if (!features) return null;
    const lengths = features.lengths.subarray(layer * this.count, (layer + 1) * this.count);
    const median = [...lengths.subarray(this.prefix)].sort((a, b) => a - b)[Math.floor(this.patches / 2)] || 1;
    const all = Float32Array.from(lengths, value => value / median), {values, ofPrefix} = this.split(all);
    const outliers = values.filter(value => value > OUTLIER).length;
    return {grid: this.grid, values, ofPrefix, low: 0, high: Math.max(...values), unit: "×", of: " of the median", signed: false,
      about: `norm of the token that leaves layer ${layer}: ${outliers || "no"} patch${outliers === 1 ? "" : "es"} above ${OUTLIER}\u00d7 the median`};
  }

  /** The cosine of each token with one of them, after a layer. */
  similarityView(layer, token) {
    const features = this.readFeatures();
    if (!features || !features.rows || token === null) return null;
    const size = features.rows.length / this.tokens.layers / this.count, scale = features.scales[layer] ** 2;
    const row = number => features.rows.subarray((layer * this.count + number) * size, (layer * this.count + number + 1) * size);
    const chosen = row(token);
    const all = Float32Array.from({length: this.count}, (_, number) => scale * row(number).reduce((sum, value, i) => sum + value * chosen[i], 0));
    const {values, ofPrefix} = this.split(all);
    return {grid: this.grid, values, ofPrefix, low: Math.min(...values), high: 1, unit: "", signed: false,
      about: `similarity to ${this.name(token)} after layer ${layer}: the cosine of the tokens`};
  }

  /** One class's map minus another's. Unsigned maps are compared by their shares, signed ones as they are. */
  difference(first, second) {
    const factor = first.signed ? second.even / first.even : 1;
    const values = first.shares.map((value, i) => value - factor * second.shares[i]);
    const end = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
    return {grid: this.grid, values, low: -end, high: end, unit: "×", signed: true, map: null,
      about: `evidence for ${first.target.name} (red) and for ${second.target.name} (blue)`};
  }

  /** What the settings ask for: {values, grid, low, high, unit, signed, about, map}, or null. */
  view(settings, token) {
    const layer = Number(settings.layer), head = settings.head === "mean" ? "mean" : Number(settings.head);
    if (settings.method === LENS) return this.lensView(layer, settings.target);
    if (settings.method === COLOURS) return this.coloursView(layer);
    if (settings.method === NORMS) return this.normsView(layer);
    if (settings.method === SIMILARITY) return this.similarityView(layer, token);
    if (settings.method === ATTENTION) return this.attention(layer, head, token, settings.direction);
    const traced = token === null ? null : this.attention(null, null, token, settings.direction);
    if (traced) return traced;
    const map = this.map(settings.method, settings.target), other = this.map(settings.method, settings.minus);
    if (!map) return null;
    if (settings.minus !== "none" && other !== map) return other ? this.difference(map, other) : null;
    return {grid: this.grid, values: map.shares, low: map.ends[0], high: map.ends[1], unit: "×", signed: map.signed, flat: map.flat, map,
      about: map.caption};
  }
}

function decodeRows(rows) {
  rows.cells ??= bytes(rows.values);
  rows.highs ??= new Float32Array(bytes(rows.maxima).buffer);
}

function attentionView(row, about) {
  return {...row, low: 0, high: row.values.reduce((a, b) => Math.max(a, b), 0), unit: "×", signed: false, about, map: null};
}

function title(layer, head) {
  if (layer === null) return "rollout";
  return `layer ${layer}` + (head === "mean" ? "" : ` head ${head}`);
}

// --- drawing ----------------------------------------------------------------------------------------------------

/** For each pixel of one axis: [cell before, cell after, weight of the one after], or null outside the box. */
function axis(pixels, start, stop, cells) {
  return Array.from({length: pixels}, (_, i) => {
    const position = ((i + .5) / pixels - start) / (stop - start) * cells;
    if (position < 0 || position >= cells) return null;
    if (!page.smooth) return [Math.floor(position), Math.floor(position), 0];
    const shifted = Math.min(Math.max(position - .5, 0), cells - 1), before = Math.floor(shifted);
    return [before, Math.min(before + 1, cells - 1), shifted - before];
  });
}

/** The colour and opacity of a fraction (0 to 1) of the scale, as of the overlay files: the opacity grows with the value.
    A signed map is clear at its zero, the middle. */
function shade(fraction, signed) {
  const strength = signed ? Math.abs(2 * fraction - 1) : fraction, side = Math.sign(fraction - .5);
  const colour = signed ? .5 + side * (.25 + .15 * strength) : .35 + .65 * strength;
  return [Math.round(colour * 255), strength ** .7];
}

/** Lay the map over the picture's pixels, as the overlay files do; what the model did not see turns grey and dark. */
function blend(picture, view, box, opacity) {
  const {width, height, data: pixels} = picture, [rows, columns] = view.grid, colours = palettes[view.signed ? 1 : 0];
  const across = axis(width, box[0], box[2], columns), down = axis(height, box[1], box[3], rows);
  const span = view.high - view.low, values = view.values;
  for (let y = 0, at = 0; y < height; y++) {
    for (let x = 0; x < width; x++, at += 4) {
      if (!down[y] || !across[x]) {
        const grey = .15 * pixels[at] + .29 * pixels[at + 1] + .06 * pixels[at + 2];
        pixels[at] = pixels[at + 1] = pixels[at + 2] = grey;
        continue;
      }
      const [top, bottom, v] = down[y], [left, right, u] = across[x];
      if (view.colours) {
        for (let c = 0; c < 3; c++) {
          const colour = (row, column) => view.colours[3 * (row * columns + column) + c];
          const over = colour(top, left) * (1 - u) + colour(top, right) * u, under = colour(bottom, left) * (1 - u) + colour(bottom, right) * u;
          pixels[at + c] = pixels[at + c] * (1 - opacity) + (over * (1 - v) + under * v) * opacity;
        }
        continue;
      }
      const upper = values[top * columns + left] * (1 - u) + values[top * columns + right] * u;
      const lower = values[bottom * columns + left] * (1 - u) + values[bottom * columns + right] * u;
      const fraction = view.flat ? .15 : span > 0 ? Math.min(Math.max((upper * (1 - v) + lower * v - view.low) / span, 0), 1) : .5;
      const [colour, strength] = shade(fraction, view.signed), alpha = opacity * strength;
      // the photo loses most of its colour, which would be taken for the map's
      const grey = .299 * pixels[at] + .587 * pixels[at + 1] + .114 * pixels[at + 2], fading = .75 * Math.min(opacity / .8, 1);
      for (let c = 0; c < 3; c++) pixels[at + c] = (pixels[at + c] * (1 - fading) + grey * fading) * (1 - alpha) + colours[3 * colour + c] * alpha;
    }
  }
}

/** The canvas of a card and the model's box in it: on the whole photo, or the box alone in the shape of its input. */
function findFrame(image, settings) {
  if (settings.frame === "whole") return {size: image.size, box: image.box};
  const scale = Math.max(...image.size) / Math.max(...image.input);
  return {size: image.input.map(side => Math.round(side * scale)), box: [0, 0, 1, 1]};
}

function drawPhoto(context, image, photo, settings) {
  const {width, height} = context.canvas;
  if (settings.frame === "whole") return context.drawImage(photo, 0, 0, width, height);
  const [left, top, right, bottom] = image.box, small = document.createElement("canvas");
  [small.width, small.height] = image.input;
  const source = [left * photo.width, top * photo.height, (right - left) * photo.width, (bottom - top) * photo.height];
  const reduced = small.getContext("2d");
  reduced.imageSmoothingQuality = "high";
  reduced.drawImage(photo, ...source, 0, 0, small.width, small.height);
  context.imageSmoothingEnabled = small.width > width; // its pixels as they are
  context.drawImage(small, 0, 0, width, height);
}

/** Draw lines around a set of patches. */
function outline(context, image, box, patches) {
  const {width, height} = context.canvas, [left, top, right, bottom] = box, [rows, columns] = image.grid;
  const cell = [(right - left) * width / columns, (bottom - top) * height / rows], lines = new Path2D();
  const inside = (row, column) => row >= 0 && row < rows && column >= 0 && column < columns && patches.has(row * columns + column);
  for (const patch of patches) {
    const row = Math.floor(patch / columns), column = patch % columns;
    // the neighbour beyond each edge, and the corners of the edge
    for (const [down, across, y0, x0, y1, x1] of [[-1, 0, 0, 0, 0, 1], [1, 0, 1, 0, 1, 1], [0, -1, 0, 0, 1, 0], [0, 1, 0, 1, 1, 1]]) {
      if (inside(row + down, column + across)) continue;
      // whole pixels, so that the lines are sharp
      lines.moveTo(Math.round(left * width + (column + x0) * cell[0]), Math.round(top * height + (row + y0) * cell[1]));
      lines.lineTo(Math.round(left * width + (column + x1) * cell[0]), Math.round(top * height + (row + y1) * cell[1]));
    }
  }
  context.lineCap = "square";
  for (const [colour, line] of [["#000", 4], ["#fff", 2]]) {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.stroke(lines);
  }
}

/** Draw a thin frame around the part of the photo that the model saw. */
function frameInput(context, box) {
  const {width, height} = context.canvas, [left, top, right, bottom] = box.map((end, i) => Math.round(end * (i % 2 ? height : width)));
  if (right - left >= width && bottom - top >= height) return;
  context.strokeStyle = "#fff";
  context.lineWidth = 1;
  context.strokeRect(left - .5, top - .5, right - left + 1, bottom - top + 1);
}

/** A view in one pixel a cell. */
function drawCells(canvas, view) {
  [canvas.height, canvas.width] = view.grid;
  const context = canvas.getContext("2d"), picture = context.createImageData(canvas.width, canvas.height);
  view.values.forEach((value, i) => {
    const colour = 3 * Math.round(255 * Math.min(Math.max(value / (view.high || 1), 0), 1));
    picture.data.set([...palettes[0].subarray(colour, colour + 3), 255], 4 * i);
  });
  context.putImageData(picture, 0, 0);
}

function ramp(signed) {
  const stops = [];
  for (let i = 0; i <= 16; i++) {
    const [colour, strength] = shade(i / 16, signed), [red, green, blue] = palettes[signed ? 1 : 0].subarray(3 * colour, 3 * colour + 3);
    stops.push(`rgb(${red} ${green} ${blue} / ${strength})`);
  }
  return `linear-gradient(to right, ${stops.join(",")})`;
}

const show = (value, unit) =>
  (unit === "×" && value ? value.toPrecision(2) : value.toFixed(unit ? 0 : 2)).replace("-", "\u2212") + unit;

const showEffect = value => (value < 0 ? "\u2212" : "+") + Math.abs(value).toPrecision(2);

// --- a card -----------------------------------------------------------------------------------------------------

class Card {
  constructor(index) {
    this.image = new Explained(index);
    this.token = null;
    this.kept = this.near = this.open = false;
    this.figure = element("card").content.firstElementChild.cloneNode(true);
    this.figure.card = this;
    this.figure.addEventListener("keydown", event => event.key === "Escape" && this.keep(null));
    this.part("path").textContent = this.image.title;
    const {name, percent, labels} = this.image.predicted; // without a percentage, what the model gives
    const sure = answers => answers.map(each => `${each.name} ${each.percent.toFixed(1)}\u00a0%`).join(", ");
    this.part("predicted").textContent = percent === null ? name : labels && !labels.length
      ? `no label predicted; most probable: ${sure([this.image.predicted])}` : `predicted: ${sure(labels || [this.image.predicted])}`;
    this.part("neighbours").replaceChildren(...listNeighbours(this.image.neighbours));
    this.part("nearest").hidden = !this.image.neighbours.length;
    this.part("expand").addEventListener("click", () => this.expand());
    this.part("expand").hidden = !this.image.tokens;
    this.part("inside").id = `inside-${index}`;
    this.part("expand").setAttribute("aria-controls", `inside-${index}`);
    this.addTokens();
    this.photo = new Image();
    this.photo.onload = () => this.draw();
    this.photo.src = this.image.photo;
  }

  part(name) { return this.figure.querySelector("." + name); }

  addTokens() {
    const names = this.image.tokens ? this.image.tokens.names : [];
    this.part("tokens").replaceChildren(...names.map((name, token) => {
      const button = document.createElement("button");
      button.type = "button";
      button.addEventListener("click", () => this.keep(token));
      return button;
    }));
    this.part("tokens").hidden = !names.length;
  }

  /** The targets of a method's maps that the settings show side by side. */
  targets({target}, method) {
    const maps = target === EACH ? this.image.maps.filter(map => map.method === method && map.target) : [];
    return maps.length ? maps.map(map => `class:${map.target.index}`) : [target];
  }

  /** A canvas for each of what the settings show: the photo, the map, or every method's; with EACH one a label. */
  addPanels(settings) {
    const methods = settings.view === "methods" ? ["", ...unique(this.image.maps.map(map => map.method))]
      : settings.view === "both" ? ["", settings.method] : [settings.method];
    const shown = methods.flatMap(method => this.targets(settings, method).map(target => ({method, target})));
    if (this.panels && this.panels.length === shown.length) {
      this.panels.forEach((panel, i) => Object.assign(panel, shown[i]));
    } else {
      this.panels = shown.map(each => ({...each, canvas: document.createElement("canvas"), name: document.createElement("span"),
        badges: document.createElement("div")}));
      this.part("panels").replaceChildren(...this.panels.map(({canvas, name, badges}) => {
        const box = document.createElement("div");
        name.className = "name";
        badges.className = "badges";
        box.append(canvas, name, badges);
        return box;
      }));
      for (const panel of this.panels) if (panel.method) this.listen(panel.canvas);
    }
    for (const {method, target, canvas, name} of this.panels) {
      const label = method && settings.target === EACH && this.image.map(method, target)?.target?.name;
      name.textContent = [settings.view === "methods" ? method || "photo" : "", label].filter(Boolean).join(": ");
      canvas.className = method ? "map" : "photo";
      canvas.setAttribute("role", method ? "application" : "img");
      canvas.setAttribute("aria-label", method ? `${this.image.title}: ${[method, label].filter(Boolean).join(", ")}; the arrow keys move between patches` : `${this.image.title}: the photo`);
    }
  }

  /** The badges of a picture: the photo's is on the first, the verdict on the map that was tested. */
  mark(panel, view) {
    const {unusual, unsure} = this.image, badges = [];
    if (unusual !== null && panel === this.panels[0])
      badges.push(badge("unusual", `unusual: unlike the training photos (p = ${unusual.toFixed(3)})`));
    if (unsure && panel === this.panels[0]) badges.push(badge("unsure", "unsure: not exactly one class is possible"));
    if (view && view.map) {
      const {verdict} = view.map.sanity_check || {verdict: page.verdicts.at(-1)};
      badges.push(badge(verdict, `patch-removal test: ${verdict}`));
    }
    panel.badges.replaceChildren(...badges);
  }

  listen(canvas) {
    canvas.tabIndex = 0;
    canvas.setAttribute("aria-roledescription", "attention map");
    canvas.addEventListener("pointermove", event => this.kept || this.point(this.tokenAt(event)));
    canvas.addEventListener("pointerleave", () => this.kept || this.point(null));
    canvas.addEventListener("click", event => this.keep(this.tokenAt(event)));
    canvas.addEventListener("blur", () => this.kept || this.point(null));
    canvas.addEventListener("keydown", event => this.press(event));
  }

  tokenAt(event) {
    const area = event.target.getBoundingClientRect(), [left, top, right, bottom] = findFrame(this.image, readSettings()).box;
    const across = ((event.clientX - area.left) / area.width - left) / (right - left);
    const down = ((event.clientY - area.top) / area.height - top) / (bottom - top);
    const [rows, columns] = this.image.grid;
    if (across < 0 || across >= 1 || down < 0 || down >= 1) return null;
    return this.image.prefix + Math.floor(down * rows) * columns + Math.floor(across * columns);
  }

  press(event) {
    const [rows, columns] = this.image.grid, first = this.image.prefix;
    const steps = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      return this.keep(this.token);
    }
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.kept = false;
    if (this.token === null || this.token < first) return this.point(first + Math.floor(rows / 2) * columns + Math.floor(columns / 2));
    const [down, across] = steps[event.key];
    const row = Math.min(Math.max(Math.floor((this.token - first) / columns) + down, 0), rows - 1);
    const column = Math.min(Math.max((this.token - first) % columns + across, 0), columns - 1);
    this.point(first + row * columns + column);
  }

  point(token) {
    if (token === this.token) return;
    this.token = token;
    this.draw();
  }

  /** Keep a token when the pointer goes; the same one again, or null, lets it go. */
  keep(token) {
    this.kept = token !== null && !(this.kept && token === this.token);
    this.token = this.kept ? token : null;
    this.draw();
  }

  expand() {
    this.open = !this.open;
    this.figure.classList.toggle("open", this.open);
    this.part("inside").hidden = !this.open;
    this.part("expand").setAttribute("aria-expanded", this.open);
    this.part("expand").textContent = this.open ? "Make small again" : "Layers and heads";
    this.draw();
    if (this.open) this.figure.scrollIntoView({block: "nearest"});
  }

  /** Draw if near the screen; far from it, give the canvases' memory back. */
  draw() {
    const settings = readSettings(), {image} = this, frame = findFrame(image, settings);
    this.addPanels(settings);
    for (const {canvas} of this.panels) {
      canvas.style.aspectRatio = frame.size.join(" / ");
      if (!this.near) canvas.width = canvas.height = 0;
    }
    if (!this.near || !this.photo.complete) return;
    for (const panel of this.panels) {
      const {canvas, method, target} = panel;
      [canvas.width, canvas.height] = frame.size;
      const context = canvas.getContext("2d", {willReadFrequently: true});
      drawPhoto(context, image, this.photo, settings);
      const view = method && image.view({...settings, method, target}, this.token);
      this.mark(panel, view);
      if (!view) continue;
      const picture = context.getImageData(0, 0, canvas.width, canvas.height);
      blend(picture, view, frame.box, settings.opacity);
      context.putImageData(picture, 0, 0);
      if (settings.opacity > 0) {
        if (view.map) outline(context, image, frame.box, new Set(view.map.outlined));
        frameInput(context, frame.box);
      }
      if (this.token !== null && this.token >= image.prefix) outline(context, image, frame.box, new Set([this.token - image.prefix]));
    }
    this.describe(settings);
    if (this.open) {
      this.drawHeads(settings);
      this.listLayers(settings);
    }
  }

  describe(settings) {
    const {image, token} = this, view = this.view = image.view(settings, token);
    const maps = this.targets(settings, settings.method).map(target => image.view({...settings, target}, token)?.map).filter(Boolean);
    const isOne = maps.length < 2;
    const focused = document.activeElement.closest("figure") || element("cards").firstElementChild; // one speaks, not all
    this.part("said").setAttribute("aria-live", focused === this.figure ? "polite" : "off");
    this.part("about").textContent = view ? this.sayToken(view, settings) || (isOne ? view.about : maps.map(map => map.caption).join("; "))
      : settings.method === SIMILARITY ? (image.features ? "point at a patch to see which others are like it" : "not in this page: explain fewer images at once")
      : `no map of this ${page.noun} was made for this image`;
    const most = view && isOne ? this.sayMost(view) : "";
    for (const place of this.figure.querySelectorAll(".most")) place.textContent = most;
    this.part("legend").hidden = !view || Boolean(view.colours);
    if (view) {
      const span = view.high - view.low, even = (1 - view.low) / span, zero = -view.low / span;
      this.part("low").textContent = isOne ? show(view.low, view.unit) : "";
      this.part("high").textContent = !isOne ? "each map has its own scale" : show(view.high, view.unit) + (view.unit === "×" ? view.of || " the average patch" : "") + (view.flat ? ", nearly even: drawn flat" : "");
      this.part("legend").querySelector("i").style.background = ramp(view.signed);
      const mark = this.part("legend").querySelector("b"), at = view.signed ? zero : even;
      mark.hidden = !isOne || view.unit !== "×" || !(at > 0 && at < 1);
      mark.style.left = `${100 * at}%`;
      mark.title = view.signed ? "0" : view.of ? "1×, the median" : "1×, the average patch";
    }
    [...this.part("tokens").children].forEach((button, number) => {
      const value = view && view.ofPrefix ? ` ${show(view.ofPrefix[number], view.unit)}` : "";
      button.textContent = image.tokens.names[number] + value;
      button.setAttribute("aria-pressed", token === number);
    });
    this.judge(maps);
  }

  /** The reason of each map's verdict, and other numbers, folded below. */
  judge(maps) {
    const map = maps[0], check = map && map.sanity_check, sinks = this.part("sinks");
    this.part("verdict").textContent = !map ? "" : !check ? "map not tested: for more than 64 images, add --checks" : maps.map(
      each => `map ${maps.length > 1 ? `of ${each.target.name} ` : ""}${each.sanity_check.verdict}: ${each.sanity_check.reason}`).join("; ");
    sinks.textContent = map ? map.sinks : "";
    sinks.hidden = !sinks.textContent;
    const numbers = check && maps.length < 2 ? Object.entries(check).filter(([, value]) => typeof value === "number") : [];
    const facts = numbers.map(([name, value]) => `${NUMBERS[name] || name} ${Number.isInteger(value) ? value : value.toFixed(3)}`);
    if (check) facts.push(`removed: ${check.patches}`);
    if (maps.length === 1) facts.unshift(map.title, `${(100 * map.prefix_mass).toFixed(0)} % in prefix tokens`, `entropy ${map.entropy.toFixed(2)}`, map.scale);
    this.part("facts").textContent = facts.filter(Boolean).join(" · ");
  }

  /** The class that the chosen token alone would give, and its value in the view. */
  sayToken(view, settings) {
    const {image, token} = this;
    if (token === null || settings.method !== LENS) return "";
    const {index, percent} = image.lensClass(Number(settings.layer), token);
    const own = token < image.prefix ? view.ofPrefix[token] : view.values[token - image.prefix];
    return `${image.name(token)} alone: ${page.classes[index]} ${percent.toFixed(0)} %; in the map ${show(own, view.unit)}`;
  }

  /** Where the view is highest. */
  sayMost(view) {
    const {image} = this;
    if (view.colours) return "";
    const columns = image.grid[1];
    const patches = [...view.values].map((value, i) => [value, `row ${Math.floor(i / columns)} column ${i % columns}`]);
    const said = patches.sort((a, b) => b[0] - a[0]).map(([value, where]) => `${where} (${show(value, view.unit)})`);
    const lowest = view.signed ? `; lowest: ${said.at(-1)}` : "";
    return `highest: ${said.slice(0, 3).join(", ")}${lowest}`;
  }

  /** A thumbnail of each layer and head; a click shows it in the picture. */
  drawHeads(settings) {
    const {image, token} = this, table = this.part("heads");
    const heads = ["mean", ...Array(image.tokens.heads).keys()], layers = [...Array(image.tokens.layers).keys()];
    const kept = token === null || image.matrix(0, 0) ? heads : ["mean"];
    this.part("heads-about").textContent = (token === null ? "What the classifier reads" : settings.direction === "reads"
      ? `What ${image.name(token)} attends to` : `What attends to ${image.name(token)}`) + ", each in its own scale. Click one to enlarge it."
      + (image.tokens.effects ? " Below: what the score of the explained class would lose without the head, to first order." : "")
      + (kept === heads ? "" : " Single heads of tokens are not in this page: explain fewer images at once to have them.");
    const focused = table.contains(document.activeElement) ? document.activeElement.dataset.at : null;
    const line = cells => {
      const row = document.createElement("tr");
      row.append(...cells);
      return row;
    };
    const heading = (text, scope) => Object.assign(document.createElement("th"), {textContent: text, scope});
    table.replaceChildren(line(["", ...kept].map(head => heading(head === "mean" ? "mean" : head === "" ? "" : `head ${head}`, "col"))),
      ...layers.map(layer => line([heading(`layer ${layer}`, "row"), ...kept.map(head => this.thumbnail(layer, head, settings))])));
    const buttons = [...table.querySelectorAll("button")];
    table.style.setProperty("--cell", `${Math.min(5.5, 28 / (kept.length + 1))}rem`); // few heads are larger
    const current = buttons.find(button => button.dataset.at === focused) || buttons.find(button => button.ariaPressed === "true") || buttons[0];
    if (current) current.tabIndex = 0;
    if (focused !== null && current) current.focus();
  }

  thumbnail(layer, head, settings) {
    const cell = document.createElement("td"), view = this.image.attention(layer, head, this.token, settings.direction);
    if (!view) return cell;
    const button = document.createElement("button"), canvas = document.createElement("canvas");
    drawCells(canvas, view);
    const chosen = settings.method === ATTENTION && settings.layer === String(layer) && settings.head === String(head);
    button.type = "button";
    button.tabIndex = -1; // one of them is reached with the tab key, the others with the arrow keys
    button.dataset.at = `${layer},${head}`;
    button.title = `${title(layer, head)}: highest ${show(view.high, view.unit)}`;
    button.ariaLabel = `layer ${layer} ${head === "mean" ? "mean over heads" : "head " + head}, highest ${show(view.high, view.unit)}`;
    button.ariaPressed = chosen;
    button.append(canvas);
    button.addEventListener("click", () => choose({method: ATTENTION, layer: String(layer), head: String(head)}));
    button.addEventListener("keydown", event => moveInTable(event, cell));
    cell.append(button);
    const effect = this.image.tokens.effects && head !== "mean" ? this.image.tokens.effects[layer][head] : null;
    if (effect !== null) cell.append(Object.assign(document.createElement("span"), {className: "effect", textContent: showEffect(effect)}));
    return cell;
  }

  /** The class that the chosen token alone would give, layer by layer. */
  listLayers(settings) {
    const {image} = this, table = this.part("lens"), lens = image.readLens();
    const token = this.token !== null ? this.token : image.prefix ? 0 : null;
    this.part("lens-about").textContent = !lens ? "Not for this classifier."
      : token === null ? "Choose a patch to see the class that it alone would give after each layer."
      : `The class that ${image.name(token)} alone would give after each layer.`;
    table.replaceChildren();
    if (!lens || token === null) return;
    for (let layer = 0; layer < image.tokens.layers; layer++) {
      const {index, percent} = image.lensClass(layer, token), row = table.insertRow();
      const meter = Object.assign(document.createElement("meter"), {min: 0, max: 100, value: percent});
      meter.ariaLabel = `${percent.toFixed(0)} %`;
      row.insertCell().textContent = `layer ${layer}`;
      row.insertCell().textContent = page.classes[index];
      row.insertCell().append(meter, ` ${percent.toFixed(0)} %`);
    }
  }
}

/** A word on a picture, with its text for screen readers. */
function badge(word, said) {
  const mark = document.createElement("span"), [text, colour] = page.badges[word];
  Object.assign(mark, {className: "badge", role: "img", ariaLabel: said, textContent: text});
  mark.style.background = colour;
  return mark;
}

function moveInTable(event, cell) {
  const {rowIndex} = cell.parentElement, {cellIndex} = cell, rows = cell.closest("table").rows;
  const steps = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
  if (!(event.key in steps)) return;
  event.preventDefault();
  const [down, across] = steps[event.key], row = rows[rowIndex + down];
  const button = row && row.cells[cellIndex + across] && row.cells[cellIndex + across].querySelector("button");
  if (button) button.focus();
}

// --- the page ---------------------------------------------------------------------------------------------------

function readSettings() {
  const value = name => element(name).value;
  return {method: value("method"), target: value("class"), minus: value("minus"), layer: value("layer"), head: value("head"),
    direction: value("direction"), view: value("view"), frame: value("frame"), opacity: value("opacity") / 100};
}

/** Fill a menu with [value, text] pairs; one with a single choice is hidden. */
function fill(name, pairs) {
  const list = element(name), before = list.value;
  list.replaceChildren(...pairs.map(([value, text]) => new Option(text, value)));
  if (pairs.some(([value]) => value === before)) list.value = before;
  list.closest("label").hidden = pairs.length < 2;
}

/** The classes to choose from: by rank where an image was explained for several, by name where all have it or any has
    several. Images that were each explained for their own predicted class offer no choice. */
function listClasses() {
  const targets = page.images.map(image => image.targets), most = Math.max(0, ...targets.map(each => each.length));
  const ranks = Array.from({length: most}, (_, i) => [String(i), RANKS[i] || `${i + 1}th most probable`]);
  const names = unique(targets.flat()).map(index => [`class:${index}`, page.classes[index]]);
  if (most < 2) return [["0", names.length === 1 ? names[0][1] : `the predicted ${page.noun}`]];
  return [...(page.noun === "label" ? [[EACH, "each label"]] : ranks), ...names.sort(byName)];
}

/** Say how many images there are, and what is to be known of all maps of the method. */
function summarise() {
  const all = page.images.length, unusual = page.images.filter(image => image.unusual !== null).length;
  const lines = [`${left < all ? `${left} of ` : ""}${all} image${all === 1 ? "" : "s"}${unusual ? `, ${unusual} unusual` : ""}`, ...page.summary[element("method").value] || []];
  element("count").textContent = lines.map(line => `${line}.`).join(" ");
}

/** The menus that depend on the method. */
function update() {
  const method = element("method").value, specific = method === LENS || page.images.some(image => image.specific.includes(method));
  const classes = specific ? listClasses() : [["0", `every ${page.noun}`]];
  fill("class", method === LENS ? classes.filter(([value]) => value.startsWith("class:") || Number(value) < 3) : classes);
  const others = specific && classes.length > 1 && method !== LENS ? classes.filter(([value]) => value !== EACH) : [];
  fill("minus", [["none", "nothing"], ...others]);
  const numbers = count => Array.from({length: count}, (_, i) => [String(i), String(i)]);
  const most = kind => Math.max(0, ...page.images.map(image => image[kind]));
  const before = element("layer").options.length;
  fill("layer", LAYERED.includes(method) ? numbers(most("layers")) : [["0", "every layer"]]);
  if (before < 2 && element("layer").options.length > 1) element("layer").value = String(most("layers") - 1); // the last
  fill("head", method === ATTENTION ? [["mean", "mean"], ...numbers(most("heads"))] : [["mean", "every head"]]);
  summarise();
  redraw();
}

function choose(values) {
  element("method").value = values.method;
  update();
  for (const [name, value] of Object.entries(values)) element(name).value = value;
  redraw();
}

const shown = () => [...element("cards").children].map(figure => figure.card);
function redraw() { for (const card of shown()) if (card.near) card.draw(); }

/** The images that the filters leave, in the order asked for. */
function list() {
  const [method, predicted, band, verdict] = ["method", "predicted", "confidence", "verdict"].map(name => element(name).value);
  const order = element("sort").value, images = page.images;
  const rank = index => page.verdicts.indexOf(worst(images[index], method));
  const kept = images.map((_, index) => index).filter(index =>
    (predicted === "all" || classesOf(images[index]).map(String).includes(predicted))
    && (band === "all" || bandOf(images[index]) === band)
    && (verdict === "all" || worst(images[index], method) === verdict));
  const confidence = index => images[index].predicted.percent;
  const orders = {
    given: () => 0,
    lowest: (a, b) => confidence(a) - confidence(b),
    highest: (a, b) => confidence(b) - confidence(a),
    class: (a, b) => images[a].predicted.name.localeCompare(images[b].predicted.name) || confidence(b) - confidence(a),
    verdict: (a, b) => rank(b) - rank(a),
  };
  waiting = kept.sort(orders[order]);
  left = kept.length;
  summarise();
  for (const card of shown()) near.unobserve(card.figure);
  element("cards").replaceChildren();
  more();
  if (element("cards").getBoundingClientRect().top < 0) element("cards").scrollIntoView(); // at the first of them
}

/** The verdict of a method's map, of views that are no map the worst of all. */
function worst(image, method) {
  const found = method in image.verdicts ? [image.verdicts[method]] : Object.values(image.verdicts);
  return found.sort((a, b) => page.verdicts.indexOf(b) - page.verdicts.indexOf(a))[0] || page.verdicts.at(-1);
}

function more() {
  for (let count = 0; count < CARDS_AT_ONCE && waiting.length && isLoaded(waiting[0]); count++) {
    const card = new Card(waiting.shift());
    element("cards").append(card.figure);
    card.draw();
    near.observe(card.figure);
  }
  end.unobserve(element("end")); // asks again whether it is near: the cards may be few
  if (waiting.length) end.observe(element("end"));
}

let waiting = [], left = page.images.length;
const near = new IntersectionObserver(entries => {
  for (const {target, isIntersecting} of entries) {
    target.card.near = isIntersecting;
    target.card.draw();
  }
}, {rootMargin: "600px"});
const end = new IntersectionObserver(entries => { if (entries.at(-1).isIntersecting) more(); }, {rootMargin: "1200px"});

const methods = [...page.methods];
if (page.images.some(image => image.layers)) methods.push(ATTENTION);
if (page.images.some(image => image.lens)) methods.push(LENS);
if (page.images.some(image => image.features)) methods.push(COLOURS, SIMILARITY, NORMS);
fill("method", methods.map(method => [method, method]));
const classesOf = ({predicted}) => (predicted.labels || [predicted]).map(each => each.index);
const bandOf = image => CONFIDENCES.findLast(([least]) => image.predicted.percent >= Number(least))[0];
/** A menu of the kinds of images that there are, with the number of each. */
function fillFilter(name, all, kindOf, pairs) {
  const kinds = page.images.flatMap(kindOf), found = pairs.filter(([kind]) => kinds.includes(kind));
  const counted = found.map(([kind, text]) => [String(kind), `${text} (${kinds.filter(each => each === kind).length})`]);
  fill(name, [["all", all], ...(counted.length > 1 ? counted : [])]);
}
const byName = (a, b) => a[1].localeCompare(b[1]);
fillFilter("predicted", `every ${page.noun}`, classesOf, unique(page.images.flatMap(classesOf)).map(index => [index, page.classes[index]]).sort(byName));
fillFilter("confidence", "every confidence", bandOf, CONFIDENCES);
const verdicts = page.verdicts.filter(verdict => page.images.some(image => Object.values(image.verdicts).includes(verdict)));
fill("verdict", [["all", "every verdict"], ...(verdicts.length > 1 ? verdicts.map(verdict => [verdict, verdict]) : [])]);
for (const name of ["class", "minus", "layer", "head", "direction", "view", "frame"]) element(name).addEventListener("change", redraw);
for (const name of ["predicted", "confidence", "verdict", "sort"]) element(name).addEventListener("change", list);
element("method").addEventListener("change", () => { update(); if (element("verdict").value !== "all" || element("sort").value === "verdict") list(); });
element("opacity").addEventListener("input", redraw);
element("direction").closest("label").hidden = !page.images.some(image => image.layers);
update();
list();
document.addEventListener("DOMContentLoaded", more);
