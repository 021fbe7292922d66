/* Every view has an address: what the reader types, picks and zooms into goes there, and the page follows it. */
(() => {
  "use strict";
  const PAUSE_MS = 250; // between two keys of somebody who types

  /* Changes fields of the address; one that is null or empty goes. The page stays where it is scrolled to. */
  function go(fields, { replaces }) {
    const query = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(fields)) {
      if (value === null || value === "") query.delete(name);
      else query.set(name, value);
    }
    if (query.toString() === new URLSearchParams(location.search).toString()) return;
    const search = query.toString() ? `?${query}` : "";
    history[replaces ? "replaceState" : "pushState"]({}, "", location.pathname + search);
    dispatchEvent(new Event("_dashprivate_pushstate"));
  }

  let typing;
  document.addEventListener("input", (event) => {
    if (event.target.id !== "runs-search") return;
    clearTimeout(typing);
    const search = event.target.value;
    const path = location.pathname;
    typing = setTimeout(() => {
      if (location.pathname === path) go({ search, page: null }, { replaces: true });
    }, PAUSE_MS);
  }, true);

  const RANGE = ["run-from", "run-to"];
  let edited; // the one of them that holds what its reader has not finished
  document.addEventListener("input", (event) => {
    if (RANGE.includes(event.target.id)) edited = event.target.id;
  }, true);

  /* The fields count steps from 1 and name the last; the address counts from 0, up to the first left out. */
  document.addEventListener("change", (event) => {
    if (!RANGE.includes(event.target.id)) return;
    edited = undefined;
    const [first, last] = RANGE.map((id) => document.getElementById(id).value.trim());
    if (![first, last].every((text) => /^[0-9]*$/.test(text))) return;
    const [from, to] = [Math.max(0, Number(first) - 1), Number(last)];
    if (last && to <= from) return;
    go({ from: first ? from : null, to: last ? to : null, window: null }, { replaces: false });
  });

  /* A link within the page leaves it where it is scrolled to. */
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[data-stay]");
    if (!link || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    history.pushState({}, "", link.href);
    dispatchEvent(new Event("_dashprivate_pushstate"));
  });

  /* Of the runs that are picked the last two count. */
  document.addEventListener("change", (event) => {
    const run = event.target.dataset?.run;
    if (!run) return;
    const before = (new URLSearchParams(location.search).get("pick") || "").split(",").filter(Boolean);
    const others = before.filter((each) => each !== run);
    const picked = before.includes(run) ? others : [...others, run].slice(-2);
    go({ pick: picked.join(",") }, { replaces: true });
  }, true);

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.address = {
    /* What the address says goes into the field, unless somebody types there. */
    searched(view) {
      const field = document.getElementById("runs-search");
      if (!view || view.page !== "runs" || field === document.activeElement) {
        return window.dash_clientside.no_update;
      }
      return (view.query || {}).search || "";
    },

    /* What was drawn with the mouse; a double click shows everything again. */
    zoomed() {
      const [triggered] = window.dash_clientside.callback_context.triggered;
      const drawn = triggered && triggered.value;
      if (!drawn) return window.dash_clientside.no_update;
      const [first, last] = [drawn["xaxis.range[0]"], drawn["xaxis.range[1]"]];
      if (first !== undefined && last !== undefined) {
        const from = Math.max(0, Math.ceil(first) - 1); // the chart counts from 1
        go({ from, to: Math.max(from + 1, Math.floor(last)), window: null }, { replaces: false });
      } else if (drawn["xaxis.autorange"]) {
        go({ from: null, to: null, window: null }, { replaces: false });
      }
      // The same range drawn again is another wish, which only a change would tell.
      window.dash_clientside.set_props(triggered.prop_id.split(".")[0], { relayoutData: null });
      return window.dash_clientside.no_update;
    },

    /* What the address asks for goes into the fields, unless somebody types there. */
    ranged(view) {
      const query = (view && view.query) || {};
      const number = (text) => (/^[0-9]{1,12}$/.test(text || "") ? Number(text) : null);
      const [from, to] = [number(query.from), number(query.to)];
      const asked = [from === null ? "" : String(from + 1), to === null ? "" : String(to)];
      return asked.map((text, place) => (
        RANGE[place] === edited && document.activeElement?.id === edited ? window.dash_clientside.no_update : text
      ));
    },
  };
})();
