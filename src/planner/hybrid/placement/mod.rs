//! Which devices stages may take: all placements of a search, plans by pattern, and plans that take as few devices as can be.

pub(crate) mod packing;
pub(crate) mod patterns;
pub(crate) mod placement_space;
