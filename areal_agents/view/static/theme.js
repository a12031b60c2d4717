// Light, dark, or as the system is; the choice stays in this browser.
import { useEffect, useState } from "./vendor/htm-preact.js";

const NAME = "areal-agents-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
const NEXT = { system: "light", light: "dark", dark: "system" };

function chosen() {
  const kept = localStorage.getItem(NAME);
  return kept in NEXT ? kept : "system";
}

export function useTheme() {
  const [theme, setTheme] = useState(chosen);
  useEffect(() => {
    const apply = () => {
      document.documentElement.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
      dispatchEvent(new Event("themechange"));
    };
    apply();
    localStorage.setItem(NAME, theme);
    dark.addEventListener("change", apply);
    return () => dark.removeEventListener("change", apply);
  }, [theme]);
  return [theme, () => setTheme(NEXT[theme])];
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Counts changes of the theme, for what is drawn on a canvas.
export function useThemeTick() {
  const [tick, setTick] = useState(0);
  useEffect(() => {
    const update = () => setTick((old) => old + 1);
    addEventListener("themechange", update);
    return () => removeEventListener("themechange", update);
  }, []);
  return tick;
}
