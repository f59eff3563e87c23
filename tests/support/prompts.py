"""Different prompts of different lengths, the same on every run."""

TOPICS = (
    "the tides", "a lighthouse keeper", "prime numbers", "the city of Lisbon", "baking bread", "migrating birds",
    "a broken clock", "the speed of light", "an old violin", "volcanoes", "the history of paper", "a train journey",
    "photosynthesis", "chess openings", "the moon", "a lost letter",
)  # fmt: skip
FORMS = (
    "Tell me about {}.",
    "Write three short sentences on {} for a child, and one for an expert. Be exact.",
    "{}",
    "My grandmother once told me a story about {}. It began on a cold morning, when nobody in the village was awake "
    "yet, and it ended many years later with a question that I still cannot answer. The question was:",
)


def prompts(count: int) -> list[str]:
    """`count` different prompts (at most 64), short and long ones mixed."""
    every = [form.format(topic) for topic in TOPICS for form in FORMS]
    return every[:count]


def sharing_prefix(count: int) -> list[str]:
    """`count` prompts that begin with the same long text."""
    start = "You are a careful librarian who answers in one paragraph, never guesses, and always names a book. " * 4
    return [start + text for text in prompts(count)]
