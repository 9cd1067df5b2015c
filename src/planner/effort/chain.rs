//! Limits on the work of partitions of chains for inference.

/// Width of one pass of the chain search.
#[derive(Clone, Copy)]
pub(crate) struct SearchWidth {
    /// Number of steps that improve the dual prices of hosts.
    pub rounds: usize,
    /// Number of labels that a bucket may keep.
    pub width: usize,
}

// Narrow passes find good plans fast, and a good plan lets later passes drop most labels. The last pass drops no label
// unless memory ends, so it proves its bound.

/// Widths of the passes, in their order. Not tuned.
pub(crate) const PASSES: [SearchWidth; 4] = [
    SearchWidth { rounds: 60, width: 24 },
    SearchWidth { rounds: 200, width: 400 },
    SearchWidth { rounds: 600, width: 6_000 },
    SearchWidth { rounds: 600, width: usize::MAX },
];

/// Limit on the pairs of a position and a later one that a search keeps, 4 bytes each: 240 MB. 10,000 positions never
/// have more. Not tuned.
pub(crate) const MAX_PAIRS: usize = 60_000_000;
