// Charts that share their range, their cursor and the moment they are drawn anew.

/** Charts that look at the same thing. */
export class Group {
  constructor({ onRange }) {
    this.charts = new Set();
    this.key = `group-${Math.random()}`;
    this.onRange = onRange;
    this.range = null;
    this.drawAgain = () => this.charts.forEach((one) => one.redraw());
    document.addEventListener("themechange", this.drawAgain);
  }

  /** Every point of every chart lies between these, unless a part was chosen. */
  extent() {
    let [low, high] = [Infinity, -Infinity];
    for (const { xs } of this.charts) {
      if (!xs.length) continue;
      low = Math.min(low, xs[0]);
      high = Math.max(high, xs.at(-1));
    }
    return low <= high ? [low, high === low ? low + 1 : high] : null;
  }

  shown() {
    return this.range ?? this.extent();
  }

  close() {
    document.removeEventListener("themechange", this.drawAgain);
    for (const one of this.charts) one.close();
  }
}
