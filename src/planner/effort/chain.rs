//! Partitions of chains for inference.

/// Width of one pass of the chain search.
#[derive(Clone, Copy)]
pub(crate) struct SearchWidth {
    /// Steps towards better dual prices of hosts.
    pub rounds: usize,
    /// Labels that a bucket may keep.
    pub width: usize,
}

/// One pass after the other. The last one drops no label unless memory ends, so it proves. Not tuned.
pub(crate) const PASSES: [SearchWidth; 4] = [
    SearchWidth { rounds: 60, width: 24 },
    SearchWidth { rounds: 200, width: 400 },
    SearchWidth { rounds: 600, width: 6_000 },
    SearchWidth { rounds: 600, width: usize::MAX },
];

/// Pairs of a position and a later one that a search keeps, 4 bytes each: 240 MB. 10,000 positions never have more. Not
/// tuned.
pub(crate) const MAX_PAIRS: usize = 60_000_000;
