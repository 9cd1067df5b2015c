//! Sets of layers as bits, with one bit for each position in the topological order.

use super::units::LayerUnit;

/// A fixed-size set of small numbers.
///
/// Sets of one graph have equal size. Their order (as large integers) has no meaning, but makes results deterministic.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BitSet(Box<[u64]>);

impl BitSet {
    /// Creates the empty set with capacity for `0..size`.
    pub(crate) fn empty(size: usize) -> Self {
        Self(vec![0; size.div_ceil(64)].into())
    }

    pub(crate) fn contains(&self, item: usize) -> bool {
        self.0[item / 64] >> (item % 64) & 1 == 1
    }

    pub(crate) fn insert(&mut self, item: usize) {
        self.0[item / 64] |= 1 << (item % 64);
    }

    pub(crate) fn is_subset(&self, of: &Self) -> bool {
        self.0.iter().zip(&of.0).all(|(inner, outer)| inner & !outer == 0)
    }

    /// Returns the items of `self` and of `other`.
    pub(crate) fn union(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(one, two)| one | two).collect())
    }

    pub(crate) fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Iterates over the items in ascending order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(index, &word)| {
            // `rest & (rest - 1)` clears the lowest bit, so the loop runs once per item instead of once per bit.
            std::iter::successors(Some(word), |rest| Some(rest & rest.wrapping_sub(1)))
                .take_while(|&rest| rest != 0)
                .map(move |rest| index * 64 + rest.trailing_zeros() as usize)
        })
    }
}

/// Positions of the layers inside each state.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum StateSets {
    /// Every state contains the one before it.
    Row {
        /// The first state, for each position, that contains it.
        enters: Vec<u32>,
        states: usize,
    },
    Listed(Vec<BitSet>),
}

impl StateSets {
    pub(super) fn listed(sets: Vec<BitSet>) -> Self {
        // Nested states need one number per layer instead of one set per state, even if the graph branches.
        if !sets.windows(2).all(|two| two[0].is_subset(&two[1])) {
            return Self::Listed(sets);
        }
        let layers = sets[sets.len() - 1].count() as usize;
        let first = |position| sets.partition_point(|set| !set.contains(position)) as u32;
        Self::Row { enters: (0..layers).map(first).collect(), states: sets.len() }
    }

    /// Creates the states that hold the first 0, 1, 2, … of `units`.
    pub(super) fn row(units: &[&LayerUnit], layers: usize) -> Self {
        let mut enters = vec![0; layers];
        for (state, unit) in (1_u32..).zip(units) {
            for &position in &unit.adds {
                // A layer that enters with its first reader is in several units, and only the first of them counts.
                if enters[position] == 0 {
                    enters[position] = state;
                }
            }
        }
        Self::Row { enters, states: units.len() + 1 }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Row { states, .. } => *states,
            Self::Listed(sets) => sets.len(),
        }
    }
}
