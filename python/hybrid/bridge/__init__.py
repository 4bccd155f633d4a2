"""What crosses the border to the browser: `job` (a run, described for the runner in JavaScript), `server` (what serves
a page and takes its uploads), `launch` (a run that a tab takes through its steps), `site` (a folder for any file host),
`stories` (the text it comes with). May import everything below `bridge`, fastapi and uvicorn.
"""
