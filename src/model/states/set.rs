//! Sets of layers as bits, one for each position in the topological order.

use super::units::LayerUnit;

/// A fixed-size set of small numbers. Sets of one graph have the same size and compare like big numbers.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BitSet(Box<[u64]>);

impl BitSet {
    /// The empty set with room for `0..size`.
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

    /// `self` with the items of `other`.
    pub(crate) fn union(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(one, two)| one | two).collect())
    }

    pub(crate) fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Items in ascending order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(index, &word)| {
            std::iter::successors(Some(word), |rest| Some(rest & rest.wrapping_sub(1)))
                .take_while(|&rest| rest != 0)
                .map(move |rest| index * 64 + rest.trailing_zeros() as usize)
        })
    }
}

/// The positions of the layers inside each state.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum StateSets {
    /// Each state holds the one before it.
    Row {
        /// For each position, the first state that holds it.
        enters: Vec<u32>,
        states: usize,
    },
    Listed(Vec<BitSet>),
}

impl StateSets {
    pub(super) fn listed(sets: Vec<BitSet>) -> Self {
        if !sets.windows(2).all(|two| two[0].is_subset(&two[1])) {
            return Self::Listed(sets);
        }
        let layers = sets[sets.len() - 1].count() as usize;
        let first = |position| sets.partition_point(|set| !set.contains(position)) as u32;
        Self::Row { enters: (0..layers).map(first).collect(), states: sets.len() }
    }

    /// The empty state, and one behind each of `units`.
    pub(super) fn row(units: &[&LayerUnit], layers: usize) -> Self {
        let mut enters = vec![0; layers];
        for (state, unit) in (1_u32..).zip(units) {
            for &position in &unit.adds {
                // A layer that enters with its first reader is in several units.
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
