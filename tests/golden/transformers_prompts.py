"""The prompts whose greedy continuation is recorded; written for this purpose."""

from __future__ import annotations

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Name three rivers that cross a border."}],
    [{"role": "user", "content": "What is 17 plus 25? Answer with the number only."}],
    [
        {"role": "system", "content": "You are a ship's cook. Keep every answer short."},
        {"role": "user", "content": "What goes well with potatoes?"},
    ],
    [
        {"role": "user", "content": "My dog is called Biscuit."},
        {"role": "assistant", "content": "What a lovely name! How old is Biscuit?"},
        {"role": "user", "content": "Four. What was the dog's name again?"},
    ],
    [{"role": "user", "content": "Write a Python function that returns the larger of two numbers."}],
    [{"role": "user", "content": "Traduis en français : the window is open."}],
    [{"role": "user", "content": "Explain in two sentences why the sky turns red in the evening."}],
    [{"role": "user", "content": "List the days of the week, separated by commas."}],
    [{"role": "user", "content": "Hello! 👋"}],
    [
        {
            "role": "user",
            "content": "Read this and say who is late.\n\nAnna arrived at eight. Ben came at a quarter past eight, out of "
            "breath, because his bus had broken down on the bridge. The meeting had begun at eight sharp, and the "
            "chairwoman had already counted the votes of the first motion when the door opened. Clara had been there "
            "since seven, arranging the chairs and filling the jug with water, as she did every Thursday.",
        }
    ],
]

PLAIN: list[str] = [
    "The lighthouse keeper had counted",
    "Once upon a time, in a village below the dam,",
    "def fibonacci(n):\n    ",
    "1, 2, 4, 8, 16,",
    "The chemical symbol of gold is",
    "Question: How many legs do two spiders have?\nAnswer:",
    "SELECT name, price FROM products WHERE",
    "# Shopping list\n\n- bread\n- milk\n-",
    "Der Zug nach Hamburg fährt heute",
    '{"city": "Lisbon", "country": "Portugal"}\n{"city": "Oslo", "country":',
]
