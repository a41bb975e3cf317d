"""The answers to what people ask about a plan: computed here, laid out in show/."""
