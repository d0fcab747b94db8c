// Curves: lines, a band around them, two axes, and the value under the pointer.

import { el, replace, setText, svg } from "./dom.js";
import { number } from "./format.js";

const HEIGHT = 150;
const PLOT = { left: 46, right: 10, top: 8, bottom: 22 };

/** Round numbers in a range, about `wanted` of them. */
function ticks(low, high, wanted) {
  const raw = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((s) => s >= raw);
  const first = Math.ceil(low / step) * step;
  const count = Math.floor((high - first) / step + 1e-9) + 1; // known before: a large number plus a small one is itself
  return Array.from({ length: Math.max(0, count) }, (_, i) => first + i * step).map((t) =>
    Math.abs(t) < step * 1e-9 ? 0 : t,
  );
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return [0, 1];
  if (low === high) return low === 0 ? [-1, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  return [low, high];
}

/**
 * `draw({lines, band, logX, label, tell})`. A line is `{points: [[x, y], …], class, many, dots}`; where y is not finite
 * there is a gap. `many`: several curves in one path, a gap between them. A band is `[[x, low, high], …]`. `tell(x)`
 * gives the text for the point nearest to the pointer.
 */
export function chart() {
  const drawing = svg("svg", { class: "chart", role: "img", height: HEIGHT });
  const told = el("div", { class: "chart-told", "aria-hidden": "true" });
  const element = el("div", { class: "chart-box" }, drawing, told);
  let last = null;
  let scale = null;
  const rule = svg("line", { class: "rule", visibility: "hidden" });

  function draw(given) {
    last = given;
    const { lines, band = [], logX = false, label, xFormat = number, yFormat = number } = given;
    const width = Math.max(200, element.clientWidth);
    const across = (v) => (logX ? Math.log2(v) : v);
    const all = lines.flatMap((line) => line.points);
    const [x0, x1] = extent(all.map(([x]) => across(x)));
    const [y0, y1] = extent([...all.map(([, y]) => y), ...band.flatMap(([, low, high]) => [low, high])]);
    const right = width - PLOT.right;
    const bottom = HEIGHT - PLOT.bottom;
    const X = (v) => PLOT.left + ((across(v) - x0) / (x1 - x0)) * (right - PLOT.left);
    const Y = (v) => bottom - ((v - y0) / (y1 - y0)) * (bottom - PLOT.top);
    scale = {
      X,
      xs: [...new Set(lines.filter((l) => !l.many).flatMap((l) => l.points.map(([x]) => x)))].sort((a, b) => a - b),
    };
    const path = (points) => {
      let d = "";
      let pen = "M";
      for (const [x, y] of points) {
        if (!Number.isFinite(y)) pen = "M";
        else {
          d += `${pen}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`;
          pen = "L";
        }
      }
      return d;
    };
    const spread = band.filter(([, low, high]) => Number.isFinite(low) && Number.isFinite(high));
    const outline = [...spread.map(([x, , high]) => [x, high]), ...spread.map(([x, low]) => [x, low]).reverse()];
    const wide = logX ? [] : ticks(x0, x1, Math.max(4, Math.floor(width / 110)));
    const logs = logX ? all.map(([x]) => x).filter((x, i, a) => a.indexOf(x) === i) : [];
    const every = Math.ceil(logs.length / Math.max(2, Math.floor(width / 70)));
    drawing.setAttribute("width", width);
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    drawing.setAttribute("aria-label", label);
    replace(
      drawing,
      ...ticks(y0, y1, 5).map((t) =>
        svg(
          "g",
          {},
          svg("line", { class: "rung", x1: PLOT.left, x2: right, y1: Y(t), y2: Y(t) }),
          svg("text", { class: "tick end", x: PLOT.left - 6, y: Y(t) + 4 }, yFormat(t)),
        ),
      ),
      ...(logX ? logs.filter((_, i) => i % every === 0) : wide).map((t) =>
        svg(
          "text",
          { class: X(t) > right - 24 ? "tick end" : "tick middle", x: X(t) > right - 24 ? width : X(t), y: HEIGHT - 6 },
          xFormat(t),
        ),
      ),
      spread.length > 1 ? svg("path", { class: "spread", d: `${path(outline)}Z` }) : null,
      ...lines.map((line) => svg("path", { class: `curve ${line.class ?? ""}`, d: path(line.points) })),
      ...lines.flatMap((line) =>
        line.points.length === 1 || line.dots
          ? line.points
              .filter(([, y]) => Number.isFinite(y))
              .map(([x, y]) => svg("circle", { class: `dot ${line.class ?? ""}`, cx: X(x), cy: Y(y), r: 2.5 }))
          : [],
      ),
      rule,
    );
  }

  drawing.addEventListener("pointermove", (event) => {
    if (!scale?.xs.length || !last.tell) return;
    const at = event.clientX - drawing.getBoundingClientRect().left;
    let best = scale.xs[0];
    for (const x of scale.xs) if (Math.abs(scale.X(x) - at) < Math.abs(scale.X(best) - at)) best = x;
    for (const [name, value] of Object.entries({
      x1: scale.X(best),
      x2: scale.X(best),
      y1: PLOT.top,
      y2: HEIGHT - PLOT.bottom,
    })) {
      rule.setAttribute(name, value);
    }
    rule.setAttribute("visibility", "visible");
    setText(told, last.tell(best));
  });
  drawing.addEventListener("pointerleave", () => {
    rule.setAttribute("visibility", "hidden");
    setText(told, "");
  });
  const observer = new ResizeObserver(() => last && draw(last));
  observer.observe(element);
  element.draw = draw;
  return element;
}
