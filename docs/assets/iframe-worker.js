/* Flags are searched for as they are typed: `--unseen` would mean "without unseen". */
const asked = message =>
  typeof message?.data === "string" ? { ...message, data: message.data.replace(/(^|\s)-+(?=\w)/g, "$1") } : message
const post = Worker.prototype.postMessage
Worker.prototype.postMessage = function (message, ...rest) { post.call(this, asked(message), ...rest) }

/* A page opened from a disk may not start a worker, which the search is. Here it runs in a hidden frame instead. */
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.inside.document.createElement("script")
      this.ready = new Promise((done, failed) => { script.onload = done; script.onerror = failed })
      script.src = url
      this.inside.document.body.append(script)
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data: asked(data) })))
    }
  }
}
