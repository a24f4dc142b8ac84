"""Agents as files: what `_agent.md` says, which agents there are, and what each of them reads."""
