// Browsers start no worker for a page from the disk: run the script of the search in a hidden frame.
// In place of https://unpkg.com/iframe-worker, which Material's offline plugin loads from the network.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const scope = frame.contentWindow
      // Firefox would replace the empty document of a new frame later.
      scope.document.open()
      scope.document.write("<body></body>")
      scope.document.close()
      scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = scope.document.createElement("script")
      script.src = new URL(url, location.href).href
      this.scope = new Promise(resolve => { script.onload = () => resolve(scope) })
      scope.document.body.append(script)
    }

    postMessage(data) {
      this.scope.then(scope => scope.dispatchEvent(new scope.MessageEvent("message", { data })))
    }
  }
}
