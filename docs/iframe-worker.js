// A page that is opened as a file may not start workers, and the search is one: there it runs in a hidden frame.
// Material's offline plugin would load such a script from the web, were this one's name not "iframe-worker".
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #loaded;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const scope = this.#frame.contentWindow;
      scope.document.open(); // or else Firefox would load an empty page over what follows
      scope.document.write("<body></body>");
      scope.document.close();
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = scope.document.createElement("script");
      script.src = url;
      this.#loaded = new Promise((resolve) => script.addEventListener("load", resolve));
      scope.document.body.append(script);
    }

    postMessage(data) {
      const scope = this.#frame.contentWindow;
      this.#loaded.then(() => scope.dispatchEvent(new scope.MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
