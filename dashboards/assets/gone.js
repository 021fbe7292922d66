/* Says that the server does not answer any more: the page would stand there as if all went on. */
(() => {
  "use strict";
  const DOUBT_MS = 1000; // one request may fail; a second one, so much later, tells
  const ASK_MS = 2000;
  const ask = window.fetch.bind(window);
  let timer = null;
  let banner = null;
  let answered = new Date();

  window.fetch = (...request) =>
    ask(...request).then(
      (answer) => {
        answered = new Date();
        if (banner === null) calm();
        return answer;
      },
      (error) => {
        if (timer === null && banner === null && error.name !== "AbortError") timer = setTimeout(look, DOUBT_MS);
        throw error;
      },
    );

  function calm() {
    clearTimeout(timer);
    timer = null;
  }

  function look() {
    ask(location.pathname, { method: "HEAD", cache: "no-store" }).then(
      // Another server may be there now: its page is the same view, by the same address.
      () => (banner === null ? calm() : location.reload()),
      () => {
        if (banner === null) tell();
        timer = setTimeout(look, ASK_MS);
      },
    );
  }

  function element(name, className, ...children) {
    const made = document.createElement(name);
    made.className = className;
    made.append(...children);
    return made;
  }

  function tell() {
    window.dash_clientside.set_props("tick", { disabled: true });
    const said = "The dashboard does not answer any more: it has ended, or the way to it is cut. What you see is of ";
    const then = "Open it again, and this page goes on by itself:";
    banner = element(
      "div",
      "gone",
      element("p", "first", said, element("span", "number", answered.toLocaleTimeString()), "."),
      element("p", "", then, " ", element("code", "", command())),
    );
    banner.setAttribute("role", "alert");
    document.body.append(banner);
    document.body.classList.add("is-gone");
  }

  /* What opens this view again, on the port at which this page looks for it. */
  function command() {
    const known = document.querySelector("meta[name=diagnose-reopen]").content;
    const run = /^\/run\/([A-Za-z0-9][A-Za-z0-9_.-]*)/.exec(location.pathname);
    const port = location.port ? ` --port ${location.port}` : "";
    return `diagnose dashboard${run ? ` ${run[1]}` : ""} ${known}${port}`;
  }
})();
