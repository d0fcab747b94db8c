// The link between two nodes of the run, as the probe measured it: bandwidth and latency by message size.

import { chart } from "./chart.js";
import { el, setText } from "./dom.js";
import { bytes, clean, number } from "./format.js";
import { section } from "./parts.js";

export function bench() {
  const about = el("p", {});
  const bandwidth = figure("Bus bandwidth, GB/s");
  const latency = figure("Latency, µs");
  const charts = el("div", { class: "charts" }, bandwidth.element, latency.element);
  const part = section("Bench", about, charts);
  part.show(false);
  let shown = "";
  return {
    element: part,
    update(it) {
      const now = JSON.stringify(it ?? null);
      if (now === shown) return;
      shown = now;
      part.show(Boolean(it));
      if (!it) return;
      const result = it.result;
      const sweep = result?.sweep ?? [];
      charts.hidden = sweep.length === 0;
      setText(about, describe(it));
      if (sweep.length === 0) return;
      const line = (field) => [{ points: sweep.map((p) => [p.sizeBytes, p[field]]), dots: true }];
      bandwidth.draw(
        line("busbwGbps"),
        (at) => tell(sweep, at, "busbwGbps", "GB/s"),
        `largest size ${number(result.busbwGbpsP50 ?? NaN)} GB/s`,
      );
      latency.draw(
        line("latencyUs"),
        (at) => tell(sweep, at, "latencyUs", "µs"),
        `at 1 MiB ${number(result.latencyUsAt1mib ?? NaN)} µs`,
      );
    },
  };
}

function figure(title) {
  const drawing = chart();
  const last = el("span", { class: "last" });
  return {
    element: el("figure", { class: "metric" }, el("figcaption", {}, title, last), drawing),
    draw(lines, tell, note) {
      setText(last, note);
      drawing.draw({ lines, tell, logX: true, xFormat: (x) => bytes(x), label: `${title} by message size; ${note}` });
    },
  };
}

function tell(sweep, at, field, unit) {
  const point = sweep.find((p) => p.sizeBytes === at);
  return point ? `${bytes(at)}: ${number(point[field])} ${unit}` : "";
}

function describe(it) {
  const r = it.result;
  if (!r) return clean(`${it.phase ?? "unknown"}${it.message ? `: ${it.message}` : ""}`);
  const between = `Between ${r.probeNodeA} and ${r.probeNodeB}${r.method ? `, with ${r.method}` : ""}`;
  const spread = r.busbwGbpsP10 === undefined ? "" : ` (p10 ${number(r.busbwGbpsP10)}, p90 ${number(r.busbwGbpsP90)})`;
  const rate = r.busbwGbpsP50 === undefined ? "" : `: bus bandwidth ${number(r.busbwGbpsP50)} GB/s${spread}`;
  const elsewhere = it.onWorkerNodes === false ? ". Not measured on the nodes of the ranks" : "";
  return clean(`${between}${rate}${elsewhere}.`);
}
