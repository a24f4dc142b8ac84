import { describe, expect, it } from "vitest";
import { attempts } from "./attempts";

const JOB = { lifecycle: "leased-job", attempt: 3, max_attempts: 5 };

describe("attempts", () => {
  it("are those that were made", () => {
    expect(attempts({ ...JOB, attempts_made: 3 })).toBe("3/5");
    expect(attempts({ ...JOB, attempt: 0, attempts_made: 0 }, " / ")).toBe("0 / 5");
  });
  it("count the present one where the answer does not count them", () => {
    expect(attempts(JOB)).toBe("4/5");
    expect(attempts({ ...JOB, attempts_made: null })).toBe("4/5");
  });
  it("are of those allowed, as the answer counts them", () => {
    expect(attempts({ ...JOB, lifecycle: "queue-job", max_attempts: 3, attempts_made: 2, attempts_allowed: 4 })).toBe("2/4");
    expect(attempts({ ...JOB, attempts_made: 3, attempts_allowed: 6 })).toBe("3/6");
  });
  it("of a queue job are one more than its retries", () => {
    expect(attempts({ ...JOB, lifecycle: "queue-job", max_attempts: 3, attempts_made: 4 })).toBe("4/4");
  });
});
