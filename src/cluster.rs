//! What is connected to what, and how fast: machines of equal devices, one kind of link inside machines and one between.

/// A kind of link. All rates are bytes per second in one direction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Point-to-point rate of one port.
    pub bytes_per_s: f64,
    /// Rate that a ring all-reduce reaches on one port.
    pub collective_bytes_per_s: f64,
    /// Time a message of zero bytes takes.
    pub latency_s: f64,
}

/// One machine: some devices of one type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// How many devices it has.
    pub devices: u32,
    /// Memory of each of them, in bytes.
    pub memory_bytes: f64,
    /// Compute speed relative to the device that the profile was measured on: times divide by it.
    pub speed: f64,
}

/// Machines and the links that join them. Devices are numbered machine by machine from 0.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// In device order.
    pub machines: Vec<Machine>,
    /// Between the devices of one machine: each device has one port.
    pub intra: Link,
    /// Between machines: each machine has one port.
    pub inter: Link,
}
