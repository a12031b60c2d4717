"""The dialect of OpenAI's legacy text completions API."""
