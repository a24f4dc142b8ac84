/** The present time, for what counts down on a screen. It stands still while the tab is hidden. */

import { useEffect, useState } from "react";

const TICK_MS = 1_000;

export function useNow(): number {
  const [now, set] = useState(Date.now);
  useEffect(() => {
    const timer = setInterval(() => {
      if (!document.hidden) set(Date.now());
    }, TICK_MS);
    return () => clearInterval(timer);
  }, []);
  return now;
}
