"""The dialect of OpenAI's Responses API."""
