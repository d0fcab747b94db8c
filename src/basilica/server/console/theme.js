// Light or dark: as the system says, until somebody chooses. It runs before the page is drawn, so that nothing flashes.
(() => {
  const KEY = "basilica-theme";
  const root = document.documentElement;

  function chosen() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // a browser that keeps nothing is a browser that follows the system
    }
  }

  function apply(theme) {
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
    else delete root.dataset.theme;
  }

  function isDark() {
    return (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  }

  function toggle() {
    const theme = isDark() ? "light" : "dark";
    apply(theme);
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // It holds for as long as the page is open.
    }
  }

  apply(chosen());
  window.basilicaTheme = { isDark, toggle };
})();
