"""Corpus -> tokens -> batches, and the numbers that a model has to beat. Knows nothing of models.

corpus.load_corpus        the shipped text, or one's own
tokenizer.load_tokenizer  text to ids and back; `python -m deepseek_lab.data.tokenizer` trains another
tokens.prepare            a corpus as memory-mapped ids, made once and found again
batches.train_batch       what a rank sees at a step, a pure function; batches.val_batches for evaluation
baselines.baselines       bits per byte of counting tables and of compressors
"""
