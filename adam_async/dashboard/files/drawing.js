// Drawings of the page: curves, bars, the map of roles, sample images. No function here reads from the network.

const SVG = "http://www.w3.org/2000/svg";

// Return an element; children are elements or texts, and never markup.
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// --- numbers as texts ------------------------------------------------------------------------

export function count(value) {
  if (value >= 1e6) return `${trimmed(value / 1e6)} M`;
  return value >= 1e4 ? `${trimmed(value / 1e3)} k` : trimmed(value);
}

function trimmed(value) {
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toFixed(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit++) value /= 1000;
  return `${trimmed(value)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds < 10) return `${trimmed(seconds)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export const share = (value) => `${(100 * value).toFixed(1).replace(".0", "")} %`;

export const clock = (at) => new Date(1000 * at).toLocaleTimeString();

// --- curves ----------------------------------------------------------------------------------

// Return round values from `low` to `high`, about `wanted` of them.
function ticks(low, high, wanted) {
  const rough = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  // Numbers, and not sums of steps: a step between two nearly equal values may be too small to change them.
  const first = Math.ceil(low / step), number = Math.min(Math.floor(high / step + 1e-9) - first, 2 * wanted + 1);
  for (let at = 0; at <= number; at++) found.push((first + at) * step);
  return found;
}

// Draw lines into a figure. Each line is {name, points, at, look}: `at` is the place of y in a point.
export function drawCurves(figure, { title, lines, axis, format, from = null }) {
  const height = 170, left = 46, bottom = 20, top = 8;
  const width = Math.max(figure.clientWidth, 180);
  const drawn = lines.map((line) => ({
    ...line, points: line.points.map((point) => [point[axis], point[line.at]]).filter(([, y]) => y !== null && y !== undefined),
  })).filter((line) => line.points.length);
  const all = drawn.flatMap((line) => line.points);
  const newest = drawn.length ? drawn[0].points.at(-1)[1] : null;
  const caption = element("figcaption", {}, title, element("span", {}, newest === null ? "no value yet" : format(newest)));
  if (!all.length) {
    figure.replaceChildren(caption);
    return;
  }
  let [low, high] = extent(all.map(([, y]) => y));
  if (from !== null) low = Math.min(from, low);
  if (low === high) [low, high] = [low - 0.5 * (Math.abs(low) || 1), high + 0.5 * (Math.abs(high) || 1)];
  let [first, last] = extent(all.map(([x]) => x));
  if (first === last) last = first + 1;
  const x = (value) => left + ((value - first) / (last - first)) * (width - left - 8);
  const y = (value) => height - bottom - ((value - low) / (high - low)) * (height - bottom - top);
  const picture = shape("svg", { width, height, role: "img", "aria-label": `${title}: ${drawn.map((line) => `${line.name} from ${format(line.points[0][1])} to ${format(line.points.at(-1)[1])}`).join(", ")}` });
  for (const value of ticks(low, high, 4)) {
    picture.append(
      shape("line", { class: "grid", x1: left, x2: width - 8, y1: y(value), y2: y(value) }),
      shape("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)),
    );
  }
  for (const value of ticks(first, last, Math.max(width / 90, 3))) {
    picture.append(shape("text", { x: x(value), y: height - 4, "text-anchor": x(value) > width - 24 ? "end" : "middle" }, axis ? duration(value) : count(value)));
  }
  for (const line of drawn) {
    const path = line.points.map(([a, b], n) => `${n ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
    picture.append(shape("path", { class: `series ${line.look}`, d: line.points.length > 1 ? path : `${path}h3` }));
  }
  const key = drawn.length < 2 ? null : element("div", { class: "key" }, ...drawn.flatMap((line) => [element("i", { class: line.look }), line.name]));
  figure.replaceChildren(...[caption, picture, key].filter(Boolean));
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

// Return a small line without axes.
export function spark(points) {
  if (points.length < 2) return element("span");
  const [first, last] = extent(points.map(([x]) => x));
  const high = Math.max(...points.map(([, y]) => y), 1e-9);
  const path = points.map(([x, y], n) => `${n ? "L" : "M"}${((x - first) / (last - first || 1) * 78 + 1).toFixed(1)} ${(19 - 17 * y / high).toFixed(1)}`).join("");
  return shape("svg", { width: 80, height: 20, "aria-hidden": "true" }, shape("path", { class: "series s0", d: path }));
}

// --- the map of roles ------------------------------------------------------------------------

const COLUMNS = [["Control", ["controller", "driver"]], ["Data", ["data"]], ["Servers", ["ps"]], ["Workers", ["worker"]], ["Clients", ["client", "reader"]]];

const MOST_ROWS = 16, MOST_LINES = 120, MOST_LABELS = 14;

// Draws boxes for roles and lines for links. Boxes are kept between drawings, so that they keep the focus.
export class RoleMap {
  constructor(place, onChoose) {
    this.place = place;
    this.onChoose = onChoose;
    this.boxes = new Map();
    this.links = shape("g", { "aria-hidden": "true" });
    this.picture = shape("svg", { role: "group", "aria-label": "Roles" }, this.links);
    place.append(this.picture);
  }

  draw({ roles, links, bundles, silent, detail }) {
    const columns = COLUMNS.map(([name, kinds]) => [name, roles.filter((role) => kinds.includes(role.role))]).filter(([, found]) => found.length);
    const width = Math.max(this.place.clientWidth, 240);
    // A column of many roles is a grid of small boxes, and three times as wide.
    const weights = columns.map(([, found]) => found.length > MOST_ROWS ? 3 : 1), whole = weights.reduce((sum, each) => sum + each, 0);
    const places = new Map();
    let bottom = 60;
    this.links.replaceChildren();
    columns.forEach(([name, found], number) => {
      const columnWidth = (width * weights[number]) / whole;
      const across = Math.ceil(found.length / MOST_ROWS), small = across > 1;
      const cell = (columnWidth - (width > 600 ? 40 : 10)) / across;
      const boxWidth = Math.min(cell - 4, 150), boxHeight = small ? 20 : 38;
      const before = weights.slice(0, number).reduce((sum, each) => sum + each, 0);
      const left = (width * before) / whole + (columnWidth - cell * across) / 2;
      this.links.append(shape("text", { class: "column", x: left, y: 12 }, `${name} (${found.length})`));
      found.forEach((role, n) => {
        const x = left + (n % across) * cell, y = 22 + Math.floor(n / across) * (boxHeight + (small ? 4 : 10));
        places.set(role.node, { x, y, width: boxWidth, height: boxHeight, column: number, role });
        bottom = Math.max(bottom, y + boxHeight + 6);
      });
    });
    this.picture.setAttribute("width", width);
    this.picture.setAttribute("height", bottom);
    this.drawLinks(links, places, bundles, width);
    this.drawBoxes(places, bundles, silent, detail);
  }

  drawLinks(links, places, bundles, width) {
    const pairs = new Map();
    for (const [sender, receiver, , rate] of links) {
      const key = [sender, receiver].sort().join(" ");
      const pair = pairs.get(key) || { a: sender, b: receiver, rate: 0 };
      pair.rate += rate;
      pairs.set(key, pair);
    }
    const shown = [...pairs.values()].sort((a, b) => b.rate - a.rate).slice(0, MOST_LINES);
    const labels = [];
    shown.forEach(({ a, b, rate }, n) => {
      let [from, to] = [places.get(a), places.get(b)];
      if (!from || !to) return;
      if (from.column > to.column) [from, to] = [to, from];
      const same = from.column === to.column, bulge = same ? 18 + 3 * (n % 4) : 0;
      const x1 = from.x + from.width, y1 = from.y + from.height / 2;
      const x2 = same ? to.x + to.width : to.x, y2 = to.y + to.height / 2;
      const middle = same ? Math.max(x1, x2) + bulge : (x1 + x2) / 2;
      const thick = rate > 0 ? Math.min(Math.max(Math.log10(rate) - 2, 0.8), 6) : 0.6;
      const line = shape("path", { class: `link${same && from.role.role === "ps" ? " copy" : ""}`, d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`, "stroke-width": thick.toFixed(1) });
      line.append(shape("title", {}, `${a} – ${b}: ${bytes(rate)}/s`));
      this.links.append(line);
      if (width < 600 || rate < 1 || labels.length >= MOST_LABELS) return;
      // The first place on the line that no other text covers; the list below the map has the rest.
      for (const way of [0.5, 0.35, 0.65, 0.25, 0.75]) {
        const rest = 1 - way, inner = 3 * way * rest;
        const x = rest ** 3 * x1 + inner * middle + way ** 3 * x2, y = (rest ** 3 + inner * rest) * y1 + (way ** 3 + inner * way) * y2 + 3;
        if (labels.some((other) => Math.abs(other.x - x) < 62 && Math.abs(other.y - y) < 12)) continue;
        labels.push({ x, y });
        this.links.append(shape("text", { class: "bytes", x: x.toFixed(1), y: y.toFixed(1), "text-anchor": "middle" }, `${bytes(rate)}/s`));
        break;
      }
    });
  }

  drawBoxes(places, bundles, silent, detail) {
    for (const [node, box] of this.boxes) {
      if (!places.has(node)) {
        box.remove();
        this.boxes.delete(node);
      }
    }
    for (const [node, { x, y, width, height, role }] of places) {
      const box = this.boxes.get(node) || this.newBox(node);
      const [frame, name, state] = box.children;
      const primary = bundles.some((bundle) => bundle.primary === node);
      const text = detail(role);
      box.setAttribute("class", `box ${role.role}${primary ? " primary" : ""}${role.state === "lost" ? " lost" : ""}${silent.has(node) ? " silent" : ""}`);
      box.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
      box.setAttribute("aria-label", `${node}: ${text}`);
      for (const [key, value] of Object.entries({ width, height, rx: 5 })) frame.setAttribute(key, value);
      const fits = (words, size) => words.length * size < width - 10 ? words : `${words.slice(0, Math.max(Math.floor((width - 14) / size), 1))}…`;
      name.textContent = width < 50 ? node.match(/\d*$/)[0] : fits(node, 7);
      name.setAttribute("y", height > 30 ? 16 : 14);
      state.textContent = height > 30 ? fits(text, 5.6) : "";
    }
  }

  newBox(node) {
    const box = shape("g", { tabindex: 0, role: "button" }, shape("rect"), shape("text", { x: 7, y: 16 }), shape("text", { class: "state", x: 7, y: 30 }));
    box.addEventListener("click", () => this.onChoose(node));
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        this.onChoose(node);
      }
    });
    this.boxes.set(node, box);
    this.picture.append(box);
    return box;
  }
}

// --- sample images ---------------------------------------------------------------------------

// Return a list item with an image drawn from raw pixels, and its prediction.
export function sample(image, { height, width, channels }) {
  const canvas = element("canvas", { width, height, role: "img", "aria-label": `image of class ${image.label}` });
  const context = canvas.getContext("2d"), picture = context.createImageData(width, height);
  const raw = Uint8Array.from(atob(image.pixels), (letter) => letter.charCodeAt(0));
  for (let pixel = 0; pixel < height * width; pixel++) {
    for (let color = 0; color < 3; color++) picture.data[4 * pixel + color] = raw[pixel * channels + (channels === 3 ? color : 0)];
    picture.data[4 * pixel + 3] = 255;
  }
  context.putImageData(picture, 0, 0);
  const wrong = image.label !== image.predicted;
  return element("li", { class: wrong ? "wrong" : "right" }, canvas,
    element("b", {}, wrong ? `${image.label}, not ${image.predicted}` : `${image.predicted}`), element("br"), share(image.confidence));
}
