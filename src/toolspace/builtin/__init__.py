"""The tools that come with Toolspace. Each module holds one family of them."""
