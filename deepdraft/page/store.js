// What the browser keeps for the page; nothing where it keeps nothing (full, forbidden, broken).

// `where`: "localStorage" or "sessionStorage"; only asking for it may be forbidden.
export function read(where, key) {
  try {
    const value = JSON.parse(window[where].getItem(key));
    return value && typeof value === "object" && !Array.isArray(value) ? value : {};
  } catch {
    return {};
  }
}

export function write(where, key, value) {
  try {
    if (value === null) window[where].removeItem(key);
    else window[where].setItem(key, JSON.stringify(value));
  } catch { /* it is forgotten, and the page goes on */ }
}
