"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const drawn = new Set();
  let plotly = null;

  // Colours of figures are names such as "@c1"; the theme holds their values.
  const probe = document.body.appendChild(document.createElement("i"));
  probe.hidden = true;
  function tone(name) {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  }
  function paint(value, key = "") {
    if (Array.isArray(value)) {
      const plain = !/color$/.test(key) && typeof value[0] !== "object";
      return plain || key === "z" ? value : value.map((v) => paint(v, key));
    }
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, paint(v, k)]));
    }
    return typeof value === "string" && /color$/.test(key) && value[0] === "@" ? tone(value.slice(1)) : value;
  }

  const heightOf = (spec, width) => (spec.square ? Math.min(spec.height, Math.round(width * 0.86) + (width < 520 ? 110 : 40)) : spec.height);
  function layoutOf(spec, width) {
    const layout = paint(spec.layout);
    const narrow = width < 520;
    const axis = { gridcolor: tone("grid"), linecolor: tone("grid"), tickcolor: tone("grid"), automargin: true, fixedrange: false };
    for (const key of Object.keys(layout)) {
      if (!/^[xy]axis/.test(key)) continue;
      layout[key] = { ...axis, ...layout[key] };
      if (key[0] === "x") {
        layout[key].tickangle = 0;
        const texts = layout[key].ticktext || [];
        const longest = Math.max(0, ...texts.map((text) => Math.max(...text.split("<br>").map((line) => line.length))));
        const every = Math.ceil((texts.length * (longest * (narrow ? 5.6 : 6.5) + 8)) / (width * 0.88));
        for (const list of every > 1 ? ["tickvals", "ticktext"] : []) {
          layout[key][list] = layout[key][list].filter((_, i, whole) => (whole.length - 1 - i) % every === 0);
        }
      }
      layout[key].title = { ...layout[key].title, standoff: 10, font: { size: 12, color: tone("muted") } };
    }
    layout.annotations = (layout.annotations || []).map((a) => ({ ...a, font: { size: narrow ? 11 : 12, color: tone("ink"), ...a.font } }));
    const { margin_top: top = layout.legend || layout.shapes?.some((s) => s.type === "line") ? 34 : 16, ...rest } = layout;
    return {
      ...rest,
      height: heightOf(spec, width),
      autosize: true,
      margin: { l: 12, r: 12, t: top, b: 12 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: narrow ? 11 : 12.5, color: tone("ink") },
      hoverlabel: { bgcolor: tone("card"), bordercolor: tone("line"), font: { color: tone("ink") }, align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: tone("muted"), activecolor: tone("ink") },
      dragmode: false,
      hovermode: "closest",
    };
  }
  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: "hover",
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
  };

  const below = { orientation: "h", x: 0.5, y: -0.2, yanchor: "top", len: 1.05, title: { text: "relative error", side: "top", font: { size: 11 } } };
  function draw(div) {
    if (!plotly || !div.clientWidth) return;
    const spec = figures[div.id];
    const data = paint(spec.data);
    if (div.clientWidth < 520) for (const trace of data) if (trace.colorbar) trace.colorbar = { ...trace.colorbar, ...below };
    drawn.add(div);
    div.style.height = `${heightOf(spec, div.clientWidth)}px`;
    return plotly.react(div, data, layoutOf(spec, div.clientWidth), config);
  }
  function drawVisible() {
    for (const div of all(".plot")) if (!drawn.has(div)) draw(div);
  }
  function redraw() {
    for (const div of drawn) draw(div);
  }

  async function unpack() {
    const bytes = Uint8Array.from(atob(document.getElementById("plotly").textContent.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    return window.Plotly;
  }
  async function start() {
    if (!Object.keys(figures).length) return;
    try {
      plotly = await unpack();
      drawVisible();
    } catch (error) {
      for (const div of all(".plot")) {
        div.style.height = "auto";
        div.textContent = div.getAttribute("aria-label") + " (This browser is too old to draw the figure.)";
      }
    }
  }

  // Theme: the system's, until the reader chooses.
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  function themed() {
    button.textContent = isDark() ? "Light theme" : "Dark theme";
    redraw();
  }
  try {
    const kept = localStorage.getItem("bilip-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch (error) {
    /* a page opened from a file may have no storage */
  }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("bilip-theme", root.dataset.theme);
    } catch (error) {
      /* as above */
    }
    themed();
  });
  system.addEventListener("change", themed);
  themed();

  // Tables: click a head to sort, again to turn round.
  for (const table of all("table.sortable")) {
    const heads = all("th", table);
    heads.forEach((head, i) =>
      head.firstElementChild.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const body = table.tBodies[0];
        const key = (row) => row.cells[i].dataset.key;
        const compare = (a, b) => {
          const [x, y] = [Number(key(a)), Number(key(b))];
          const [noX, noY] = [Number.isNaN(x), Number.isNaN(y)];
          if (noX && noY) return key(a).localeCompare(key(b), undefined, { numeric: true }) * (up ? 1 : -1);
          if (noX || noY) return noX ? 1 : -1;
          return (x < y ? -1 : x > y ? 1 : 0) * (up ? 1 : -1);
        };
        body.append(...[...body.rows].sort(compare));
      }),
    );
  }

  // Tabs: one model at a time.
  const tabs = all("[role=tab]");
  function choose(id, focus = false) {
    for (const tab of tabs) {
      const on = tab.getAttribute("aria-controls") === id;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = !on;
      if (on && focus) tab.focus();
    }
    drawVisible();
  }
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => choose(tab.getAttribute("aria-controls")));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const next = step ? tabs[(i + step + tabs.length) % tabs.length] : { Home: tabs[0], End: tabs[tabs.length - 1] }[event.key];
      if (next) {
        event.preventDefault();
        choose(next.getAttribute("aria-controls"), true);
      }
    });
  });
  for (const link of all("[data-tab]")) link.addEventListener("click", () => choose(link.dataset.tab));
  if (tabs.length) {
    const wanted = location.hash.slice(1).split("-").slice(0, 2).join("-");
    const panel = tabs.find((tab) => tab.getAttribute("aria-controls") === wanted) || tabs[0];
    choose(panel.getAttribute("aria-controls"));
  }
  for (const fold of all("details")) fold.addEventListener("toggle", drawVisible);

  // Paper shows everything, dark on white.
  let before = null;
  window.addEventListener("beforeprint", () => {
    before = before || { theme: root.dataset.theme, open: all("details[open]") };
    root.dataset.theme = "light";
    for (const fold of all("details")) fold.open = true;
    for (const panel of all(".panel")) panel.hidden = false;
    redraw();
    drawVisible();
  });
  window.addEventListener("afterprint", () => {
    if (!before) return;
    if (before.theme) root.dataset.theme = before.theme;
    else delete root.dataset.theme;
    for (const fold of all("details")) fold.open = before.open.includes(fold);
    const on = tabs.find((tab) => tab.getAttribute("aria-selected") === "true");
    if (on) choose(on.getAttribute("aria-controls"));
    before = null;
    redraw();
  });

  for (const copy of all("[data-copy]")) {
    copy.addEventListener("click", async () => {
      const source = document.getElementById(copy.dataset.copy);
      try {
        await navigator.clipboard.writeText(source.textContent);
      } catch (error) {
        getSelection().selectAllChildren(source);
        document.execCommand("copy");
      }
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
  }
  for (const download of all("[data-download]")) {
    download.addEventListener("click", () => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([document.getElementById(download.dataset.download).textContent], { type: "application/json" }));
      link.download = `${download.dataset.download}.json`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  }
  window.bilipReady = start();
})();
