//! Random numbers that depend on the seed alone.

/// Random numbers (Steele, Lea and Flood's splitmix64, 2014).
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// From 0 to `count - 1`.
    pub(super) fn below(&mut self, count: usize) -> usize {
        ((u128::from(self.next()) * count as u128) >> 64) as usize
    }

    /// Above 0, at most 1.
    pub(super) fn part(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    pub(super) fn is_heads(&mut self) -> bool {
        self.next() & 1 == 1
    }

    /// 1, or with a chance of a half 2, a quarter 3, …
    pub(super) fn distance(&mut self) -> usize {
        1 + self.next().trailing_zeros() as usize
    }
}
