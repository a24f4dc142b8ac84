export function Agents() {
  return null;
}
export function AgentPage() {
  return null;
}
