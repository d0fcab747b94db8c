// A long list of rows of one height, of which only those in sight exist.

const MARGIN = 12; // rows beyond the edges, so that a quick scroll shows no gap

export class Windowed {
  /**
   * `scroller` scrolls and holds `list` somewhere inside. `height()` is that of a row, `count()` how many there are,
   * `key(i)` what a row is of, and `render(i, element)` fills an element that may have shown that key before. `inset()`
   * is the height of what covers the top of the scroller.
   */
  constructor({ scroller, list, height, count, key, render, make, inset = () => 0 }) {
    Object.assign(this, { scroller, list, height, count, key, render, make, inset });
    this.elements = new Map();
    this.onScroll = () => this.schedule();
    scroller.addEventListener("scroll", this.onScroll, { passive: true });
    this.observer = new ResizeObserver(() => this.schedule());
    this.observer.observe(scroller);
  }

  close() {
    this.scroller.removeEventListener("scroll", this.onScroll);
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
  }

  schedule() {
    if (this.frame !== undefined) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = undefined;
      this.draw();
    });
  }

  /** Where the list begins, in what the scroller scrolls. */
  get top() {
    const within = this.list.getBoundingClientRect().top - this.scroller.getBoundingClientRect().top;
    return within + this.scroller.scrollTop;
  }

  /** The rows in sight, as [first, last). */
  range() {
    const height = this.height();
    const above = this.scroller.scrollTop - this.top;
    const first = Math.max(0, Math.floor(above / height) - MARGIN);
    const last = Math.min(this.count(), Math.ceil((above + this.scroller.clientHeight) / height) + MARGIN);
    return [Math.min(first, last), last];
  }

  draw() {
    const height = this.height();
    const [first, last] = this.range();
    // Room for the rows that do not exist, as padding: the scroll bar is that of the whole list.
    this.list.style.paddingTop = `${first * height}px`;
    this.list.style.paddingBottom = `${Math.max(0, this.count() - last) * height}px`;
    const focused = this.list.contains(document.activeElement) ? document.activeElement : null;
    const next = new Map();
    for (let i = first; i < last; i += 1) {
      const key = this.key(i);
      const element = this.elements.get(key) ?? this.make();
      this.render(i, element);
      next.set(key, element);
    }
    for (const [key, element] of this.elements) if (!next.has(key)) element.remove();
    let at = this.list.firstElementChild;
    for (const element of next.values()) {
      if (element === at) at = at.nextElementSibling;
      else this.list.insertBefore(element, at);
    }
    this.elements = next;
    // An element that was moved has lost the focus.
    if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true });
  }

  /** Scrolls so that a row is in sight, in the middle if asked. */
  reveal(index, { centre = false } = {}) {
    const height = this.height();
    const begin = this.top + index * height;
    const room = this.scroller.clientHeight;
    if (centre) this.scroller.scrollTop = begin - room / 2;
    else if (begin - this.inset() < this.scroller.scrollTop) this.scroller.scrollTop = begin - this.inset();
    else if (begin + height > this.scroller.scrollTop + room) this.scroller.scrollTop = begin + height - room;
    this.draw();
  }

  /** The element of a row, if it is in sight. */
  elementOf(key) {
    return this.elements.get(key);
  }
}
