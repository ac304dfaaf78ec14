// SPDX-License-Identifier: GPL-2.0-only
// Loaded before Bochs: what it takes to run Debian's program as it is, the same way each time. bootstrap.sh adds a function that
// aborts for each function of GTK, the libraries of the graphical debugger, which is never opened here.
#define _GNU_SOURCE
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

// Bochs seeds what RDRAND gives from the time.
void srand(unsigned seed)
{
	(void)seed;
	srandom(1);
}

// Bochs maps the guest's memory in blocks, in the order of their first use, but loads a file into memory as if blocks lay side by
// side. Asked again after each small piece, it goes through its map.
ssize_t read(int file, void *to, size_t size)
{
	const size_t piece = 1 << 16;
	return syscall(SYS_read, file, to, size > piece ? piece : size);
}

// The display without a display serves VNC. Nobody outside this machine is to see it.
int bind(int socket, const struct sockaddr *address, socklen_t size)
{
	struct sockaddr_in own;
	if (address->sa_family != AF_INET || size < sizeof own)
		return syscall(SYS_bind, socket, address, size);
	own = *(const struct sockaddr_in *)address;
	own.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return syscall(SYS_bind, socket, &own, sizeof own);
}
