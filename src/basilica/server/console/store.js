// All runs as the server last told of them. Who shows them is called once a frame at most, however fast they change.

export class Runs {
  constructor() {
    this.rows = new Map();
    this.known = false; // until the first list is there, none is not the same as no runs
    this.changed = null;
    this.due = false;
  }

  /** Takes one message of `GET /watch`. */
  apply({ runs, deleted, all }) {
    if (all) {
      const there = new Set(all);
      for (const name of this.rows.keys()) if (!there.has(name)) this.rows.delete(name);
    }
    for (const row of runs) this.rows.set(row.instanceName, row);
    for (const name of deleted) this.rows.delete(name);
    this.known = true;
    this.notify();
  }

  notify() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      this.changed?.();
    });
  }
}
