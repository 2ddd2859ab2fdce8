// Two ranks send each other BYTES bytes at once, REPEATS times, and check them. Rank 0 prints one line:
// the seconds of the fastest repeat. Before the first one the connection is used a little, since an
// MPI connects with the first message.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static unsigned char byte_of(int rank, int repeat, int at) {
  return (unsigned char)(7 * rank + 13 * repeat + at % 251);
}

int main(int argc, char** argv) {
  int rank = 0, size = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (argc != 3 || size != 2) {
    fprintf(stderr, "usage: swap_mpi BYTES REPEATS, with 2 ranks\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  const int bytes = atoi(argv[1]), repeats = atoi(argv[2]), peer = 1 - rank;
  unsigned char* out = malloc(bytes);
  unsigned char* in = malloc(bytes);
  double best = 1e9;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (int at = 0; at < bytes; ++at) {
      out[at] = byte_of(rank, repeat, at);
      in[at] = 0;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    const double began = MPI_Wtime();
    MPI_Sendrecv(out, bytes, MPI_BYTE, peer, 0, in, bytes, MPI_BYTE, peer, 0, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    double took = MPI_Wtime() - began, last = 0;
    MPI_Allreduce(&took, &last, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    best = last < best ? last : best;
    for (int at = 0; at < bytes; ++at) {
      if (in[at] != byte_of(peer, repeat, at)) {
        fprintf(stderr, "rank %d: byte %d of repeat %d is wrong\n", rank, at, repeat);
        MPI_Abort(MPI_COMM_WORLD, 1);
      }
    }
  }
  if (rank == 0) {
    printf("seconds %.6f\n", best);
  }
  MPI_Finalize();
  free(out);
  free(in);
  return 0;
}
