"""Plans of transformers for clusters whose nodes differ (docs/llm-mixed.md)."""
