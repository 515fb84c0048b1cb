/* A server that is no limit: one epoll loop answers every request with the same bytes.
   cc -O2 -o stub stub.c && ./stub ANSWER_FILE      prints its port */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define MOST 65536 /* bytes of a request, and connections */
static struct { char *at; int n; } got[MOST];

static int whole(const char *at, int n) { /* bytes of the first request, 0 if some are missing */
    const char *end = strstr(at, "\r\n\r\n");
    if (!end) return 0;
    int length = end + 4 - at;
    for (const char *line = at; line < end; line = strstr(line, "\r\n") + 2)
        if (!strncasecmp(line, "content-length:", 15)) length += atoi(line + 15);
    return length <= n ? length : 0;
}

int main(int argc, char **argv) {
    static char answer[1 << 20];
    FILE *file = fopen(argc > 1 ? argv[1] : "", "rb");
    if (!file) return 2;
    int size = fread(answer, 1, sizeof answer, file), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), events = epoll_create1(0);
    bind(listener, (struct sockaddr *)&address, length);
    listen(listener, 4096);
    getsockname(listener, (struct sockaddr *)&address, &length);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, ready[256];
    epoll_ctl(events, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        int n = epoll_wait(events, ready, 256, -1);
        for (int i = 0; i < n; i++) {
            int fd = ready[i].data.fd;
            if (fd == listener) {
                fd = accept(listener, 0, 0);
                if (fd < 0) continue;
                if (fd >= MOST) { close(fd); continue; }
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                if (!got[fd].at) got[fd].at = malloc(MOST);
                got[fd].n = 0;
                event.data.fd = fd;
                epoll_ctl(events, EPOLL_CTL_ADD, fd, &event);
                continue;
            }
            int more = read(fd, got[fd].at + got[fd].n, MOST - 1 - got[fd].n);
            if (more <= 0) { close(fd); continue; }
            got[fd].n += more;
            got[fd].at[got[fd].n] = 0;
            for (int used; (used = whole(got[fd].at, got[fd].n));) {
                if (write(fd, answer, size) != size) { close(fd); break; }
                memmove(got[fd].at, got[fd].at + used, got[fd].n -= used);
                got[fd].at[got[fd].n] = 0;
            }
        }
    }
}
