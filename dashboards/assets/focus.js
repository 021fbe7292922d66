/* Who goes through a page by the keyboard keeps the place: Dash makes new nodes of whatever it draws again. */
(() => {
  "use strict";
  const CAN_HOLD_IT = "a, button, input, select, summary, [tabindex]";
  let held; // what has the focus, and how to find what takes its place

  const nameOf = (node) => `${node.tagName} ${node.getAttribute("aria-label") || node.textContent}`;

  /* Those within the same part of the page that are called the same, in order. */
  const likeIt = (part, name) => [...part.querySelectorAll(CAN_HOLD_IT)].filter((node) => nameOf(node) === name);

  document.addEventListener("focusin", ({ target }) => {
    const part = target.parentElement?.closest("[id]");
    if (!part) return;
    const name = nameOf(target);
    held = { target, part: part.id, name, place: likeIt(part, name).indexOf(target) };
  });

  /* Whoever leaves it by himself has moved on; what is taken away is gone by then. */
  document.addEventListener("focusout", ({ target }) => {
    setTimeout(() => {
      if (held?.target === target && target.isConnected) held = undefined;
    });
  });

  new MutationObserver(() => {
    if (!held || held.target.isConnected || document.activeElement !== document.body) return;
    const part = document.getElementById(held.part);
    if (part) likeIt(part, held.name)[held.place]?.focus({ preventScroll: true });
  }).observe(document.documentElement, { childList: true, subtree: true });
})();
