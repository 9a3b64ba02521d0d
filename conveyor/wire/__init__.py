"""The wire: an HTTP/1.1 client that fetches bodies whole, from servers that are hostile, slow and
wrong.

It knows nothing of scraping. `client.HttpClient` sends requests; `errors` lists how an exchange can
fail. Runs on asyncio.
"""
