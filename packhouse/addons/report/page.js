// Charts, and the browser of samples. Text of rows only ever becomes text nodes.
"use strict";
(() => {
  const one = (id) => document.getElementById(id);
  const root = document.documentElement;
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const count = (n) => n.toLocaleString("en-US");
  const counted = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;
  const make = (tag, text, names) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (names) node.className = names;
    return node;
  };

  // -- charts
  const config = () => {
    const ink = css("--ink"), quiet = css("--quiet"), line = css("--line");
    const text = { labelColor: quiet, titleColor: quiet, labelFontSize: 11, titleFontSize: 11, titleFontWeight: 400 };
    return {
      background: null, aria: false, font: "system-ui, sans-serif",
      view: { stroke: null }, autosize: { type: "fit-x", contains: "padding" },
      axis: { ...text, gridColor: line, domainColor: line, tickColor: line, titlePadding: 8 },
      axisX: { grid: false },
      legend: { ...text, symbolType: "circle", labelLimit: 180 },
      range: { category: css("--series").split(",") },
      bar: { color: css("--series").split(",")[0] },
      text: { color: ink }, rule: { color: ink },
      style: { ink: { stroke: ink, fill: ink } },
    };
  };
  const draw = () => {
    if (!window.vegaEmbed) return;
    const style = config();
    delete style.style.ink.stroke;
    style.rule = { color: css("--ink") };
    for (const spec of document.querySelectorAll("script.spec")) {
      const box = one(spec.id.replace("spec-", "chart-"));
      window.vegaEmbed(box, JSON.parse(spec.textContent), {
        mode: "vega-lite", ast: true, actions: false, renderer: "svg", config: style,
        tooltip: { theme: root.dataset.theme === "dark" || isDark() ? "dark" : "light" },
      }).then(() => {
        box.querySelector("svg").setAttribute("aria-hidden", "true"); // the box has a name, and a table
      }).catch((error) => { box.textContent = `This chart cannot be drawn: ${error.message}`; });
    }
  };
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : scheme.matches);
  const theme = one("theme");
  const name = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    name();
    draw();
  });
  scheme.addEventListener("change", () => { name(); draw(); });
  name();
  draw();

  // -- samples
  const island = one("samples-data");
  if (!island) return;
  const splits = JSON.parse(island.textContent);
  const box = one("tokens"), say = one("token"), find = one("find"), where = one("where");
  const tip = document.body.appendChild(make("div", "", ""));
  tip.id = "tip";
  const packs = splits.flatMap((split) => split.packs.map((pack) => ({ ...pack, split: split.name })));
  const label = (pack) => pack.label || `${pack.split} pack ${count(pack.pack)}`;
  const MOST = 30;
  let at = 0, active = null;

  // Tokens of a character that several tokens share are one span, which names all of their ids.
  const spans = (record) => {
    if (record.spans) return record.spans;
    const trained = new Uint8Array(record.ids.length), special = new Set(record.special);
    for (const [start, end] of record.trained) trained.fill(1, start, end);
    const weights = new Float64Array(record.ids.length).fill(record.weights ? 0 : 1);
    for (const [start, end, weight] of record.weights || []) weights.fill(weight, start, end);
    const found = [];
    let first = 0, offset = 0;
    record.texts.forEach((text, i) => {
      if (text === "" && i + 1 < record.texts.length) return;
      found.push({ first, last: i, text, offset, trained: trained[i], special: special.has(i), weight: weights[i] });
      offset += text.length;
      first = i + 1;
    });
    record.whole = found.map((span) => span.text).join("").toLowerCase();
    return (record.spans = found);
  };
  const about = (record, span) => {
    const ids = record.ids.slice(span.first, span.last + 1).join(" + ");
    const weight = span.trained && record.weights && `loss weight ${Number(span.weight.toPrecision(6))}`;
    const kind = [span.special && "special", span.trained ? "trained" : "not trained", weight].filter(Boolean).join(", ");
    return `id ${ids}  ${JSON.stringify(span.text)}\n${kind}; token ${count(span.first)} of ${count(record.length)}` +
      `, ${count(record.start + span.first)} of its pack`;
  };
  const hits = (record, query) => {
    const marked = [];
    for (let from = 0; query && (from = record.whole.indexOf(query, from)) >= 0; from += query.length) {
      marked.push([from, from + query.length]);
    }
    return marked;
  };
  const show = (pack, record, query) => {
    const head = make("h3");
    const size = `${count(record.length)} tokens, ${count(record.num_trained)} trained`;
    const said = [record.side, record.place, size, label(pack)].filter(Boolean).join(" · ");
    head.append("record ", make("b", record.id || "without id"), ` · ${said}`);
    const body = make("p");
    body.dir = "auto";
    const marked = hits(record, query);
    spans(record).forEach((span, number) => {
      const names = [span.trained && "t", span.special && "s", span.trained && span.weight !== 1 && "w"].filter(Boolean);
      if (marked.some(([a, b]) => a < span.offset + span.text.length && b > span.offset)) names.push("hit");
      const node = make("span", span.text, names.join(" "));
      node.record = record;
      node.span = span;
      body.append(node);
    });
    if (record.ids.length < record.length) {
      body.append(make("i", ` ... ${count(record.length - record.ids.length)} more tokens are not shown`));
    }
    box.append(head, body);
  };
  const render = () => {
    const query = find.value.trim().toLowerCase();
    box.replaceChildren();
    active = null;
    say.textContent = "";
    one("before").disabled = Boolean(query) || at === 0;
    one("after").disabled = Boolean(query) || at >= packs.length - 1;
    if (!query) {
      const pack = packs[at];
      where.textContent = `${label(pack)}: sample ${at + 1} of ${packs.length}, ` +
        `${counted(pack.num_tokens, "token")}, ${counted(pack.num_records, "record")}`;
      for (const record of pack.records) show(pack, record, "");
      const more = pack.num_records - pack.records.filter((record) => record.side !== "rejected").length;
      if (more > 0) box.append(make("p", `${count(more)} more records are not shown`));
    } else {
      let found = 0;
      for (const pack of packs) for (const record of pack.records) {
        spans(record);
        const isIt = record.id.startsWith(query) || (record.place || "").toLowerCase().includes(query);
        if (isIt || record.whole.includes(query)) {
          if (found < MOST) show(pack, record, query);
          found += 1;
        }
      }
      where.textContent = `${count(found)} of the records shown here match` + (found > MOST ? `; the first ${MOST} are below` : "");
    }
    box.scrollTop = 0;
  };
  const focus = (node) => {
    if (active) active.classList.remove("on");
    active = node;
    if (!node) return;
    node.classList.add("on");
    say.textContent = about(node.record, node.span).replace("\n", "; ");
  };
  let waiting = 0;
  find.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(render, 120); });
  one("before").addEventListener("click", () => { at -= 1; render(); });
  one("after").addEventListener("click", () => { at += 1; render(); });
  box.addEventListener("mousemove", (event) => {
    const node = event.target;
    if (!node.span) { tip.style.display = "none"; return; }
    tip.textContent = about(node.record, node.span);
    tip.style.display = "block";
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
  });
  box.addEventListener("mouseleave", () => { tip.style.display = "none"; });
  box.addEventListener("click", (event) => { if (event.target.span) focus(event.target); });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const all = [...box.querySelectorAll("span")];
    const next = all[active ? all.indexOf(active) + step : 0];
    if (next) { focus(next); next.scrollIntoView({ block: "nearest" }); }
  });
  render();
})();
