/** A unified diff, line by line, with the changed words marked. */

import { wordDiff } from "../lib/diff";
import { writtenOut } from "../lib/unseen";

export function Diff({ unified }: { unified: string }) {
  const signs = { file: " ", hunk: " ", context: " ", add: "+", remove: "−" };
  return (
    <div className="diff" tabIndex={0} role="group" aria-label="diff">
      {wordDiff(writtenOut(unified)).map((line, at) => (
        <div key={at} className={line.kind}>
          <span className="sign">{signs[line.kind]}</span>
          <span>
            {line.segments.map((one, index) =>
              !one.changed ? one.text : line.kind === "add" ? <ins key={index}>{one.text}</ins> : <del key={index}>{one.text}</del>,
            )}
          </span>
        </div>
      ))}
    </div>
  );
}

