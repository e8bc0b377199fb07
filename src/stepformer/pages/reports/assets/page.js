/* The report's page: sortable tables, legends, the charts of each section. */

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();
  const charts = [];
  const legends = [];

  /* Tables */

  function sortTable(table, column, header) {
    const rising = header.getAttribute("aria-sort") !== "ascending";
    for (const other of table.querySelectorAll("thead th")) other.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const key = (row) => row.cells[column].dataset.value;
    const numeric = header.classList.contains("number");
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined); /* empty cells last */
      const order = numeric ? Number(x) - Number(y) : x.localeCompare(y, "en", { numeric: true });
      return rising ? order : -order;
    };
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort(compare));
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.querySelectorAll("thead th")].forEach((header, column) => {
      const button = make("button", { type: "button" });
      button.append(...header.childNodes);
      header.append(button);
      header.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => sortTable(table, column, header));
    });
  }

  /* Legends: one choice for all charts of the page */

  function refresh() {
    for (const legend of legends) legend();
    for (const chart of charts) chart.redraw();
  }

  function addLegend(host, groups) {
    const box = make("div", { class: "legend", role: "group", "aria-label": "Show or hide architectures" }, host);
    const buttons = groups.map((group) => {
      const button = make("button", { type: "button", "data-group": group, title: "Click to hide or show; with Shift: only this one" }, box);
      swatch(group, button);
      button.append(data.labels[group]);
      button.addEventListener("click", (event) => {
        if (event.shiftKey) data.labels.forEach((_, g) => (g === group ? hidden.delete(g) : hidden.add(g)));
        else if (!hidden.delete(group)) hidden.add(group);
        refresh();
      });
      return [group, button];
    });
    const all = make("button", { type: "button", class: "all" }, box, "show all");
    all.addEventListener("click", () => { hidden.clear(); refresh(); });
    const update = () => {
      for (const [group, button] of buttons) button.setAttribute("aria-pressed", String(!hidden.has(group)));
      all.hidden = !hidden.size;
    };
    legends.push(update);
    update();
  }

  function addButtons(host, title, options, chosen, onChoose) {
    const group = make("span", { class: "group", role: "group", "aria-label": title }, host);
    if (title) make("span", { "aria-hidden": "true" }, group, title);
    const box = make("span", { class: "buttons" }, group);
    const buttons = options.map(([name, words]) => {
      const button = make("button", { type: "button", "data-name": name, "aria-pressed": String(name === chosen) }, box, words);
      button.addEventListener("click", () => {
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
        onChoose(name);
      });
      return button;
    });
  }

  function addToggle(host, name, words, on, onChange) {
    const box = make("span", { class: "buttons" }, host);
    const button = make("button", { type: "button", "data-name": name, "aria-pressed": String(on) }, box, words);
    button.addEventListener("click", () => {
      const now = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(now));
      onChange(now);
    });
    return button;
  }

  function addFigure(host, title, unit) {
    const figure = make("figure", {}, host);
    const caption = make("figcaption", {}, figure);
    make("span", {}, caption, title);
    make("span", { class: "unit" }, caption, unit);
    return [figure, caption];
  }

  const groupsOf = (lines) => [...new Set(lines.map((line) => line.group))].sort((a, b) => a - b);

  /* Loss curves */

  function timeUnit(longest) {
    if (longest < 180) return ["s", 1];
    return longest < 3 * 3600 ? ["min", 60] : ["h", 3600];
  }

  function curveSection(host) {
    const parts = ["evaluation", "training"].filter((kind) => data.curves[kind].some((c) => c.step.length));
    if (!parts.length) return;
    const everything = parts.flatMap((kind) => data.curves[kind]);
    const longest = everything.flatMap((c) => c.seconds).reduce((a, b) => Math.max(a, b || 0), 0);
    const [unit, size] = timeUnit(longest);
    const whole = (v) => Math.round(v).toLocaleString("en");
    const axes = {
      step: { key: "step", xLabel: "step", xFull: whole, scale: 1, name: "step" },
      tokens: { key: "tokens", xLabel: "training tokens", xFull: whole, scale: 1, name: "tokens" },
      time: { key: "seconds", xLabel: `time in training steps (${unit})`, scale: size, name: "time", xFull: (v) => `${shown(v)} ${unit}` },
    };
    const controls = make("div", { class: "controls" }, host);
    const mine = [];
    const each = (change) => mine.forEach((chart) => { change(chart); chart.redraw(); });
    const fill = (axis) => each((chart) => {
      const { key, xLabel, xFull, scale, name } = axes[axis];
      const usable = data.curves[chart.kind].filter((c) => !c[key].includes(null));
      chart.lines = usable.map((c) => ({ group: c.group, seed: c.seed, x: c[key].map((v) => v / scale), y: c.loss }));
      Object.assign(chart, { xLabel, xFull, xName: name, whole: axis === "step", zoom: { x: null, y: null } });
      host.dataset.axis = axis;
    });
    addButtons(controls, "over", [["step", "step"], ["tokens", "tokens"], ["time", "time"]], "step", (axis) => { fill(axis); zoomed(); });
    addToggle(controls, "logx", "log x", false, (on) => each((chart) => Object.assign(chart, { logX: on, zoom: { x: null, y: null } })));
    addToggle(controls, "logy", "log y", false, (on) => each((chart) => Object.assign(chart, { logY: on, zoom: { x: null, y: null } })));
    addToggle(controls, "whole", "from the start", false, (on) => each((chart) => Object.assign(chart, { focus: !on })));
    const box = make("span", { class: "buttons" }, controls);
    const reset = make("button", { type: "button", "data-name": "reset" }, box, "reset zoom");
    reset.addEventListener("click", () => { each((chart) => { chart.zoom = { x: null, y: null }; }); zoomed(); });
    const zoomed = () => { box.hidden = !mine.some((chart) => chart.zoom.x || chart.zoom.y); };
    addLegend(host, groupsOf(everything));
    const grid = make("div", { class: "charts wide" }, host);
    const titles = { evaluation: "Validation loss", training: "Training loss" };
    for (const kind of parts) {
      const unitText = kind === "training" && data.window > 1 ? `nats per token, mean over ${data.window} values` : "nats per token";
      const [figure] = addFigure(grid, titles[kind], unitText);
      figure.dataset.kind = kind;
      const reference = data.entropy === null ? null : { y: data.entropy, text: "unigram entropy" };
      const chart = new Chart(figure, { title: titles[kind], names: data.labels, hidden, height: 320, focus: true, kind, reference });
      chart.onZoom = () => {
        for (const other of mine) {
          if (other !== chart) { other.zoom = { x: chart.zoom.x, y: null }; other.redraw(); }
        }
        zoomed();
      };
      mine.push(chart);
      charts.push(chart);
    }
    fill("step");
    zoomed();
  }

  /* Everything else by layer or index */

  function chartSection(host, specs) {
    if (!specs.length) return;
    const lines = specs.flatMap((spec) => spec.lines);
    addLegend(host, groupsOf(lines));
    const grid = make("div", { class: "charts" }, host);
    for (const spec of specs) {
      const [figure, caption] = addFigure(grid, spec.title, spec.y);
      const chart = new Chart(figure, {
        title: spec.title, names: data.labels, hidden, xLabel: spec.x, whole: spec.whole, logY: spec.log, height: 210,
        scattered: spec.points,
      });
      const choices = [...new Set(spec.lines.map((line) => line.choice))];
      const choose = (choice) => {
        chart.lines = spec.lines.filter((line) => line.choice === choice);
        chart.redraw();
      };
      if (choices.length > 1) {
        const select = make("select", { "aria-label": `${spec.title}: which` }, caption);
        for (const choice of choices) make("option", { value: choice }, select, choice);
        select.addEventListener("change", () => choose(select.value));
      }
      charts.push(chart);
      choose(choices[0]);
    }
  }

  /* Surfaces: the same colours for the same loss everywhere, dark for the lowest of all. */

  const SHADES = [[13, 34, 84], [28, 92, 148], [58, 150, 160], [140, 197, 151], [244, 233, 164]];

  function shade(part) {
    const place = Math.min(0.9999, Math.max(0, part)) * (SHADES.length - 1);
    const i = Math.floor(place);
    return SHADES[i].map((low, c) => Math.round(low + (place - i) * (SHADES[i + 1][c] - low)));
  }

  function surfaceSection(host, surfaces) {
    if (!surfaces.length) return;
    const known = (rows) => rows.flat().filter((v) => v !== null);
    const all = surfaces.flatMap((s) => known(s.loss));
    const low = all.reduce((a, b) => Math.min(a, b));
    const high = all.reduce((a, b) => Math.max(a, b));
    const grid = make("div", { class: "charts" }, host);
    for (const surface of surfaces) {
      const least = known(surface.loss).reduce((a, b) => Math.min(a, b));
      const most = known(surface.loss).reduce((a, b) => Math.max(a, b));
      const name = `${data.labels[surface.group]} s${surface.seed}`;
      const [figure] = addFigure(grid, name, `loss from ${least.toFixed(3)} to ${most.toFixed(3)}; dark is low, one scale for all; first direction to the right`);
      figure.className = "surface";
      const size = [surface.x.length, surface.y.length];
      const canvas = make("canvas", { width: size[0], height: size[1], role: "img", "aria-label": `Loss over a plane through the weights of ${name}` }, figure);
      const image = new ImageData(...size);
      surface.loss.forEach((row, j) => row.forEach((value, i) => {
        if (value === null) return;
        const colour = shade((value - low) / (high - low || 1));
        image.data.set([...colour, 255], 4 * ((size[1] - 1 - j) * size[0] + i));
      }));
      canvas.getContext("2d").putImageData(image, 0, 0);
    }
  }

  for (const host of document.querySelectorAll("[data-part]")) {
    const name = host.dataset.part;
    if (name === "curves") curveSection(host);
    else {
      chartSection(host, data.parts[name].charts);
      surfaceSection(host, data.parts[name].surfaces);
    }
  }

  /* Paper shows everything. */
  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
})();
