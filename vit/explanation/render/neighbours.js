/* The nearest training photos as list items: picture where it can be read, class, cosine, name of the file. */
function listNeighbours(neighbours) {
  return neighbours.map(({path, class_name, similarity, picture}) => {
    const item = document.createElement("li"), said = document.createElement("span"), name = document.createElement("span");
    if (picture) item.append(Object.assign(new Image(), {src: picture, alt: `training photo ${path}`}));
    // a photo with several labels has no class
    said.textContent = [class_name, similarity.toFixed(2)].filter(Boolean).join(", ");
    Object.assign(name, {className: "muted", textContent: path.split("/").at(-1), title: path});
    item.append(said, name);
    return item;
  });
}
