// The only way that anything reaches the page: elements by name, and text as text. There is no markup in strings.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== undefined && child !== null && child !== false) element.append(child);
  }
  return element;
}

/** An element with attributes (`onclick` and the like are listeners) and children; strings become text nodes. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** New children instead of the old; what is null is left out. */
export function replace(element, ...children) {
  element.replaceChildren(...children.filter((child) => child !== null));
}

/** Brings elements into an order. One that is in its place is not touched: it keeps its focus and what is selected. */
export function arrange(parent, elements) {
  let at = parent.firstElementChild;
  for (const element of elements) {
    if (element === at) at = at.nextElementSibling;
    else parent.insertBefore(element, at);
  }
}

/** Changes a text only if it is another: an unchanged node costs no layout, and nothing is read out again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null || value === undefined) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

/** Says something to screen readers, also if it is the same as before. */
export function announce(text) {
  const said = document.getElementById("said");
  said.textContent = said.textContent === text ? `${text}\u00a0` : text;
}
