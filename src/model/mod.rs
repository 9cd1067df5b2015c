//! What is trained: a graph of layers, and where it may be cut.

pub mod graph;
pub mod lineage;
pub(crate) mod order;
pub mod states;
