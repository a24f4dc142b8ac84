import { describe, expect, it } from "vitest";
import { fingerprint, grouped } from "./letters";

const letter = (job_id: string, last_error: string, type = "mail.send") => ({
  job_id,
  type,
  lifecycle: "leased-job",
  reason_code: "max_attempts",
  last_error,
  at: "",
});

describe("grouped", () => {
  it("joins errors that differ only in ids and numbers, largest group first", () => {
    const groups = grouped([
      letter("1", "connect to 10.0.0.1:25 failed after 3 s"),
      letter("2", "no such user 'ada'"),
      letter("3", "connect to 10.0.0.7:25 failed after 12 s"),
      letter("4", "connect to 10.0.0.7:25 failed after 12 s", "page.fetch"),
    ]);
    expect(groups.map((one) => [one.type, one.letters.map((l) => l.job_id).join()])).toEqual([
      ["mail.send", "1,3"],
      ["mail.send", "2"],
      ["page.fetch", "4"],
    ]);
  });

  it("keeps the words of an error", () => {
    expect(fingerprint("job 7f1c2c4e-8a54-4b0e-9d2e-3c5d1a2b3c4d: disk full")).toBe("job …: disk full");
  });
});
