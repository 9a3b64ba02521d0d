// Show instants in the reader's zone. The title keeps UTC.
const today = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const otherDay = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

export function showTimes(root) {
  const now = new Date();
  for (const element of root.querySelectorAll("time[datetime]")) {
    const instant = new Date(element.dateTime);
    if (Number.isNaN(instant.getTime())) continue;
    const isToday = instant.toDateString() === now.toDateString();
    element.textContent = (isToday ? today : otherDay).format(instant);
  }
}
