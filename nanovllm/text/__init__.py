"""Text: from messages to a prompt, and from tokens to text.

chat_template.py   messages of OpenAI's API to a prompt
prompt_encoder.py  prompts to token ids
detokenizer.py     tokens to text, one after another
generated_text.py  the text of a sample, which only grows; stop strings in it
vocabulary.py      names and bytes of single tokens
foreign_code.py    runs code of tokenizers and chat templates
"""
