//! Random numbers that depend on the seed alone, so that every run of a search gives the same plan.

/// A splitmix64 generator (Steele, Lea and Flood, 2014). The field is its state.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Returns a number from 0 to `count - 1`.
    pub(super) fn below(&mut self, count: usize) -> usize {
        // Multiply and shift instead of a remainder: nearly free of bias, and faster.
        ((u128::from(self.next()) * count as u128) >> 64) as usize
    }

    /// Returns a number above 0 and at most 1, so that its logarithm is finite.
    pub(super) fn part(&mut self) -> f64 {
        // 53 bits are the precision of an f64.
        ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    pub(super) fn is_heads(&mut self) -> bool {
        self.next() & 1 == 1
    }

    /// Returns 1 with probability 1/2, 2 with probability 1/4, 3 with probability 1/8, and so on.
    pub(super) fn distance(&mut self) -> usize {
        1 + self.next().trailing_zeros() as usize
    }
}
