"""What serves pages and files: `serve`, `app`, `routes_*`, `login`, `pages`, `runs`, `feed`, `hub`, `imports` (the
server of `hybrid serve`), and what a launched run shares: `guard`, `files`, `uploads`, `plans`, `serving`, `refusals`.
May import everything below `bridge`, `bridge.job`, `bridge.site`, fastapi and uvicorn.
"""
