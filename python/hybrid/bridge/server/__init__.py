"""Pieces of servers for a page: `guard` (who may ask), `refusals` (typed errors as answers), `files` (with ranges),
`uploads` (checkpoints by pieces), `plans` (compiled for a device that a page describes), `temporary` (folders),
`serving` (a server in a thread). May import everything below `bridge`, fastapi and uvicorn.
"""
