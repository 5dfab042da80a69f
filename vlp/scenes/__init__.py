"""The generated corpus: images of coloured shapes, with captions and samples of other tasks."""
