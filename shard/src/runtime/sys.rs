//! Safe wrappers of the system calls the standard library does not offer.
//!
//! Invariant: this and its sibling modules are the only place of the project (with
//! [`crate::memory`]) that contains `unsafe`; every wrapper checks what the kernel needs checked.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::OnceLock;

use crate::io::Space;
use crate::memory::file_from_descriptor;

/// Pending connections the kernel may hold for a listener.
pub const BACKLOG_MAX: i32 = 1024;
/// CPUs considered by the affinity calls.
pub const CPUS_MAX: usize = libc::CPU_SETSIZE as usize;

/// The error of the last system call if its result says it failed.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Microseconds of the monotonic clock, the same for all cores.
#[must_use]
pub fn monotonic_us() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes the struct given; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    (time.tv_sec as u64)
        .wrapping_mul(1_000_000)
        .wrapping_add(time.tv_nsec as u64 / 1_000)
}

/// Milliseconds of the wall clock since the epoch.
#[must_use]
pub fn wall_ms() -> i64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes the struct given; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut time) };
    time.tv_sec
        .wrapping_mul(1_000)
        .wrapping_add(time.tv_nsec / 1_000_000)
}

/// CPU time this thread has used, in nanoseconds.
#[must_use]
pub fn thread_cpu_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes the struct given; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    (time.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(time.tv_nsec as u64)
}

/// An anonymous file in memory.
pub fn memory_file(name: &str) -> io::Result<File> {
    let name = std::ffi::CString::new(name)?;
    // SAFETY: the name is a valid C string for the length of the call.
    file_from_descriptor(unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) })
}

/// The huge page size of the file system if it is hugetlbfs.
pub fn huge_page_bytes(file: &File) -> io::Result<Option<u64>> {
    // SAFETY: statfs is plain data for which zeros are a valid value.
    let mut status: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: writes the struct given, through an open descriptor.
    check(unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut status) })?;
    let is_huge = status.f_type as u64 & 0xffff_ffff == 0x9584_58f6;
    Ok(is_huge.then_some(status.f_bsize as u64))
}

/// Allocates space of a range, growing the file where needed.
pub fn allocate(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let (Ok(offset), Ok(bytes)) = (i64::try_from(offset), i64::try_from(bytes)) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    loop {
        // SAFETY: an open descriptor and plain numbers.
        match check(unsafe { libc::fallocate(file.as_raw_fd(), 0, offset, bytes) }) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Space of the file system below a path.
pub fn space(path: &Path) -> io::Result<Space> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path is a valid C string; the call writes the struct given.
    space_by(|status| unsafe { libc::statvfs(path.as_ptr(), status) })
}

/// Space of the file system of an open file.
pub fn space_of(file: &File) -> io::Result<Space> {
    // SAFETY: an open descriptor; the call writes the struct given.
    space_by(|status| unsafe { libc::fstatvfs(file.as_raw_fd(), status) })
}

fn space_by(call: impl FnOnce(*mut libc::statvfs) -> libc::c_int) -> io::Result<Space> {
    // SAFETY: statvfs is plain data for which zeros are a valid value.
    let mut status: libc::statvfs = unsafe { std::mem::zeroed() };
    check(call(&raw mut status))?;
    let unit = status.f_frsize;
    Ok(Space {
        total_bytes: status.f_blocks.saturating_mul(unit),
        available_bytes: status.f_bavail.saturating_mul(unit),
    })
}

/// Memory the system could still hand out without swapping, if it says so.
#[must_use]
pub fn available_memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Alignment the file asks of direct transfers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirectAlignment {
    /// Of memory, in bytes.
    pub memory_bytes: u32,
    /// Of offset and length, in bytes.
    pub offset_bytes: u32,
}

/// Asks the file system for its direct alignment; `None` when it does not say (kernels before
/// 6.1) or cannot do direct transfers.
pub fn direct_alignment(file: &File) -> io::Result<Option<DirectAlignment>> {
    // SAFETY: statx is plain data for which zeros are a valid value.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    let path = c"";
    // SAFETY: an open descriptor, a valid C string, and the struct to write.
    check(unsafe {
        libc::statx(
            file.as_raw_fd(),
            path.as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut status,
        )
    })?;
    let said = status.stx_mask & libc::STATX_DIOALIGN != 0 && status.stx_dio_offset_align != 0;
    Ok(said.then_some(DirectAlignment {
        memory_bytes: status.stx_dio_mem_align,
        offset_bytes: status.stx_dio_offset_align,
    }))
}

/// The soft limit of locked memory in bytes (`u64::MAX` = none).
#[must_use]
pub fn memlock_limit_bytes() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: writes the struct given.
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    limit.rlim_cur
}

/// Raises the soft limit of open files to the hard one and returns what holds afterwards.
pub fn raise_open_files_limit() -> io::Result<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: writes the struct given.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) })?;
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: reads the struct given.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })?;
    Ok(limit.rlim_cur)
}

/// The CPUs this process may use, as they were before any of its threads was pinned. The kernel
/// has already cut them to the cpuset.
pub fn process_cpus() -> &'static [usize] {
    static CPUS: OnceLock<Vec<usize>> = OnceLock::new();
    CPUS.get_or_init(|| {
        // The main thread's set: a thread started by a pinned one would report a single CPU.
        let main_thread = libc::pid_t::try_from(std::process::id()).unwrap_or(0);
        allowed_cpus_of(main_thread).unwrap_or_else(|_| vec![0])
    })
}

/// Pins the calling thread to a CPU.
pub fn pin_to_cpu(cpu: usize) -> io::Result<()> {
    // Remembered before it is too late.
    process_cpus();
    restrict_to(&[cpu])
}

/// Lets the calling thread run wherever the process may: helper threads inherit the pinning of
/// the core that starts them, and would share its CPU for ever.
pub fn unpin() -> io::Result<()> {
    restrict_to(process_cpus())
}

fn restrict_to(cpus: &[usize]) -> io::Result<()> {
    if cpus.iter().any(|cpu| *cpu >= CPUS_MAX) {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    // SAFETY: cpu_set_t is plain data for which zeros are the empty set; indexes were checked.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for cpu in cpus {
            libc::CPU_SET(*cpu, &mut set);
        }
        check(libc::sched_setaffinity(
            0,
            size_of::<libc::cpu_set_t>(),
            &raw const set,
        ))?;
    }
    Ok(())
}

/// The CPUs the calling thread may run on.
pub fn allowed_cpus() -> io::Result<Vec<usize>> {
    allowed_cpus_of(0)
}

fn allowed_cpus_of(thread: libc::pid_t) -> io::Result<Vec<usize>> {
    // SAFETY: cpu_set_t is plain data; the call writes it; indexes stay below CPU_SETSIZE.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        check(libc::sched_getaffinity(
            thread,
            size_of::<libc::cpu_set_t>(),
            &raw mut set,
        ))?;
        Ok((0..CPUS_MAX)
            .filter(|cpu| libc::CPU_ISSET(*cpu, &set))
            .collect())
    }
}

/// A non-blocking event counter.
pub fn event_counter() -> io::Result<File> {
    // SAFETY: plain numbers.
    file_from_descriptor(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
}

/// Waits until a descriptor is readable or a time has passed; whether it is readable.
pub fn wait_readable(descriptor: RawFd, timeout_ms: i32) -> io::Result<bool> {
    let mut poll = libc::pollfd {
        fd: descriptor,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one struct to read and write.
    match check(unsafe { libc::poll(&raw mut poll, 1, timeout_ms) }) {
        Ok(count) => Ok(count > 0),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
        Err(error) => Err(error),
    }
}

/// A socket address in the kernel's form.
pub struct RawAddress {
    storage: libc::sockaddr_storage,
    bytes: libc::socklen_t,
}

impl RawAddress {
    /// Converts an address.
    #[must_use]
    pub fn new(address: SocketAddr) -> RawAddress {
        // SAFETY: sockaddr_storage is plain data for which zeros are a valid value.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let bytes = match address {
            SocketAddr::V4(v4) => {
                let raw = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr {
                        s_addr: u32::from(*v4.ip()).to_be(),
                    },
                    sin_zero: [0; 8],
                };
                // SAFETY: sockaddr_storage is larger than and aligned for every address type.
                unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(raw) };
                size_of::<libc::sockaddr_in>()
            }
            SocketAddr::V6(v6) => {
                let raw = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr {
                        s6_addr: v6.ip().octets(),
                    },
                    sin6_scope_id: v6.scope_id(),
                };
                // SAFETY: as above.
                unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(raw) };
                size_of::<libc::sockaddr_in6>()
            }
        };
        RawAddress {
            storage,
            bytes: bytes as libc::socklen_t,
        }
    }
    /// For the kernel; valid as long as `self` stays where it is.
    #[must_use]
    pub fn pointer(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }
    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> libc::socklen_t {
        self.bytes
    }
}

/// A TCP socket for the family of an address.
pub fn tcp_socket(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    // SAFETY: plain numbers.
    let descriptor =
        check(unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: a fresh descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

fn set_flag(socket: &OwnedFd, level: libc::c_int, name: libc::c_int) -> io::Result<()> {
    let one: libc::c_int = 1;
    // SAFETY: an open descriptor and a live int of the stated length.
    check(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const one).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    })?;
    Ok(())
}

/// Sets TCP_NODELAY.
pub fn set_no_delay(socket: &OwnedFd) -> io::Result<()> {
    set_flag(socket, libc::IPPROTO_TCP, libc::TCP_NODELAY)
}

/// A listening socket, bound once.
pub fn tcp_listener(address: SocketAddr, share_port: bool) -> io::Result<TcpListener> {
    let socket = tcp_socket(address)?;
    set_flag(&socket, libc::SOL_SOCKET, libc::SO_REUSEADDR)?;
    if share_port {
        set_flag(&socket, libc::SOL_SOCKET, libc::SO_REUSEPORT)?;
    }
    let raw = RawAddress::new(address);
    // SAFETY: an open descriptor and an address that lives for the call.
    check(unsafe { libc::bind(socket.as_raw_fd(), raw.pointer(), raw.bytes()) })?;
    // SAFETY: an open descriptor.
    check(unsafe { libc::listen(socket.as_raw_fd(), BACKLOG_MAX) })?;
    Ok(TcpListener::from(socket))
}

/// Ends both directions of a socket; errors (already gone) do not matter.
pub fn shut_down(socket: &OwnedFd) {
    // SAFETY: an open descriptor.
    unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) };
}

/// The remote address of a connected socket. An IPv4 peer of a listener for both families is told
/// as what it is, so that records and ids do not depend on the listener.
pub fn peer_address(socket: &OwnedFd) -> io::Result<SocketAddr> {
    // A borrowed stream: the descriptor must not be closed when it goes out of scope.
    // SAFETY: the descriptor is open and stays owned by `socket`.
    let stream = std::mem::ManuallyDrop::new(unsafe {
        std::net::TcpStream::from_raw_fd(socket.as_raw_fd())
    });
    let peer = stream.peer_addr()?;
    Ok(match peer.ip().to_canonical() {
        std::net::IpAddr::V4(ip) => SocketAddr::from((ip, peer.port())),
        std::net::IpAddr::V6(_) => peer,
    })
}

/// Owns a descriptor the kernel handed over in a completion.
///
/// The caller states that the number came from a successful accept and is owned by nobody.
pub(crate) fn own_accepted(descriptor: RawFd) -> Option<OwnedFd> {
    // SAFETY: multishot accept returns each new descriptor exactly once.
    (descriptor >= 0).then(|| unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// The signals that ask the process to stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopSignal {
    /// SIGINT.
    Interrupt,
    /// SIGTERM.
    Terminate,
}

/// Receives SIGINT and SIGTERM in place of their default action.
#[derive(Debug)]
pub struct SignalWaiter {
    descriptor: File,
}

impl SignalWaiter {
    /// Blocks the two signals for this thread and those it starts later, so call it first thing in
    /// `main`.
    pub fn new() -> io::Result<SignalWaiter> {
        // SAFETY: sigset_t is plain data initialised by sigemptyset before use.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, libc::SIGINT);
            libc::sigaddset(&raw mut set, libc::SIGTERM);
            let result =
                libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            if result != 0 {
                return Err(io::Error::from_raw_os_error(result));
            }
            let descriptor =
                libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            Ok(SignalWaiter {
                descriptor: file_from_descriptor(descriptor)?,
            })
        }
    }

    /// Waits up to a time (negative: for ever) for one of the signals.
    pub fn wait(&self, timeout_ms: i32) -> io::Result<Option<StopSignal>> {
        if !wait_readable(self.descriptor.as_raw_fd(), timeout_ms)? {
            return Ok(None);
        }
        let mut record = [0u8; size_of::<libc::signalfd_siginfo>()];
        let length = match io::Read::read(&mut &self.descriptor, &mut record) {
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        };
        // The signal's number is the first field.
        let number = match record.first_chunk::<4>() {
            Some(bytes) if length == record.len() => i32::from_ne_bytes(*bytes),
            _ => return Ok(None),
        };
        Ok(match number {
            libc::SIGINT => Some(StopSignal::Interrupt),
            libc::SIGTERM => Some(StopSignal::Terminate),
            _ => None,
        })
    }
}

/// Writes a range of a ring's memory, blocking. The range must lie inside one mapping.
pub(crate) fn write_from_mapping(
    file: &File,
    memory: &crate::memory::Mapping,
    offset: usize,
    len: usize,
    file_offset: u64,
) -> io::Result<()> {
    let inside = offset
        .checked_add(len)
        .is_some_and(|end| end <= memory.bytes());
    let Ok(target) = i64::try_from(file_offset) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    if !inside {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "{len} bytes at {offset} are outside a ring of {} bytes",
                memory.bytes()
            ),
        ));
    }
    let mut done = 0;
    while done < len {
        // SAFETY: the range was checked to lie inside the mapping, which `memory` keeps alive. It
        // is passed as a pointer because the core may be changing other bytes of the same block.
        let result = unsafe {
            libc::pwrite(
                file.as_raw_fd(),
                memory.data_pointer().add(offset + done).cast(),
                len - done,
                target + done as i64,
            )
        };
        match usize::try_from(result) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero)),
            Ok(count) => done += count,
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// Seconds that local time is ahead of UTC at a time.
#[must_use]
pub fn utc_offset_s(at_s: i64) -> i64 {
    let mut local: libc::tm = zeroed_tm();
    // SAFETY: both pointers are to live values of the right type; localtime_r only writes `local`.
    let found = unsafe { libc::localtime_r(&raw const at_s, &raw mut local) };
    if found.is_null() { 0 } else { local.tm_gmtoff }
}

fn zeroed_tm() -> libc::tm {
    // SAFETY: `tm` is a plain C structure of integers and a pointer, for which all zeros is valid.
    unsafe { std::mem::zeroed() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_helper_of_a_pinned_thread_can_leave_its_cpu() {
        let all = process_cpus().to_vec();
        std::thread::spawn(move || {
            pin_to_cpu(all[0]).unwrap();
            assert_eq!(allowed_cpus().unwrap(), [all[0]]);
            std::thread::spawn(move || {
                assert_eq!(allowed_cpus().unwrap(), [all[0]]);
                unpin().unwrap();
                assert_eq!(allowed_cpus().unwrap(), all);
            })
            .join()
            .unwrap();
        })
        .join()
        .unwrap();
        assert!(pin_to_cpu(CPUS_MAX).is_err());
    }

    #[test]
    fn stop_signals_arrive_as_values() {
        std::thread::spawn(|| {
            let waiter = SignalWaiter::new().unwrap();
            assert_eq!(waiter.wait(0).unwrap(), None);
            // SAFETY: raises in this thread only, where the signal is blocked.
            unsafe { libc::raise(libc::SIGTERM) };
            assert_eq!(waiter.wait(1000).unwrap(), Some(StopSignal::Terminate));
            assert_eq!(waiter.wait(0).unwrap(), None);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn addresses_keep_family_port_and_host() {
        for text in ["127.0.0.1:80", "[::1]:8080"] {
            let address: SocketAddr = text.parse().unwrap();
            let listener = tcp_listener(SocketAddr::new(address.ip(), 0), false);
            // A machine may have no IPv6.
            let Ok(listener) = listener else { continue };
            let bound = listener.local_addr().unwrap();
            assert_eq!(bound.ip(), address.ip());
            assert_ne!(bound.port(), 0);
        }
    }
}
