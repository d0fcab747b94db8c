// A long list of rows of one height, of which only those in sight exist.

import { arrange } from "./dom.js";

const MARGIN = 12; // rows beyond the edges, so that a quick scroll shows no gap

export class Windowed {
  /**
   * `scroller` scrolls and holds `list` somewhere inside. `height()` is that of a row, `count()` how many there are,
   * `key(i)` what a row is of, and `render(i, element)` fills an element that may have shown that key before. `inset()`
   * is the height of what covers the top of the scroller. Where rows can have the focus, `find(key)` tells where a row
   * is now, less than 0 if nowhere, and `vanished(i)` is called when the one with the focus, once there, is no more.
   */
  constructor({ scroller, list, height, count, key, render, make, inset = () => 0, find = null, vanished = null }) {
    Object.assign(this, { scroller, list, height, count, key, render, make, inset, find, vanished });
    this.elements = new Map();
    this.focusedAt = 0;
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
    const held = focused === null || this.find === null ? -1 : this.findFocused(focused);
    const rows = Array.from({ length: last - first }, (_, i) => first + i);
    if (held >= 0 && held < first) rows.unshift(held);
    if (held >= last) rows.push(held);
    const next = new Map();
    for (const i of rows) {
      const key = this.key(i);
      const element = this.elements.get(key) ?? this.make();
      this.render(i, element);
      const apart = i < first || i >= last; // out of sight, and there because it has the focus
      element.classList.toggle("apart", apart);
      element.style.top = apart ? `${i * height}px` : "";
      next.set(key, element);
    }
    for (const [key, element] of this.elements) if (!next.has(key)) element.remove();
    arrange(this.list, next.values());
    this.elements = next;
    // An element that was moved has lost the focus.
    if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true });
    if (focused !== null && !focused.isConnected) this.vanished?.(this.focusedAt);
  }

  /** Where the row with the focus is now. */
  findFocused(focused) {
    const [key] = [...this.elements].find(([, element]) => element.contains(focused));
    const index = this.find(key);
    if (index >= 0) this.focusedAt = index;
    return index;
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
